"""The processes (ranks) that train one head together: which of them this one is, what they tell each other, how a job starts its own.

A launcher tells a rank who it is by its environment: the one here, torchrun and `accelerate launch` by RANK and WORLD_SIZE, Slurm's srun
by SLURM_PROCID and its kin. Without any of it a process is alone, and nothing here imports torch.
"""

import ctypes
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mtptrain.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

_PATIENCE = timedelta(days=30)
"""How long a rank waits for another: a stage that the first does alone may take days."""
_SAVING_SECONDS = "600"
"""What a rank has to save a checkpoint once it was told to end."""
_PORTS = 16384


@dataclass(slots=True, frozen=True)
class Ranks:
    """Who takes part. All methods but `share` are called by every rank, at the same point."""

    rank: int = 0
    world: int = 1
    local_world: int = 1
    """Of them on this machine."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of `items`: every `world`-th."""
        return list(items[self.rank :: self.world])

    def gather(self, value: Item) -> list[Item]:
        """What each rank gave (picklable, small), by rank; every rank gets all of it."""
        if self.world == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def unshare(self, mine: Sequence[Item]) -> list[Item]:
        """The whole that `share` took these of, or what was made of them one by one."""
        parts = self.gather(list(mine))
        return [parts[i % self.world][i // self.world] for i in range(sum(map(len, parts)))]

    def first(self, work: Callable[[], Result]) -> Result:
        """What the first rank's `work()` gives. Where it raises, the others end as well, without a word."""
        if self.world == 1:
            return work()
        done: tuple[bool, Any] = (False, None)
        error: BaseException | None = None
        if self.is_first:
            try:
                done = (True, work())
            except BaseException as raised:
                error = raised
        succeeded, result = self.gather(done)[0]
        if error is not None:
            raise error
        if not succeeded:
            raise SystemExit(2)
        return result

    def sum_(self, tensors: "Sequence[Tensor]") -> None:
        """Each tensor becomes the sum of all ranks', the same bits everywhere."""
        if self.world > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.all_reduce(tensor)

    def broadcast_(self, tensors: "Sequence[Tensor]") -> None:
        """Each tensor becomes the first rank's."""
        if self.world > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.broadcast(tensor, src=0)


ALONE = Ranks()


def announced(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several."""
    return _world(environment) > 1


def join(on_cpu: bool, threads: int = 0) -> Ranks:
    """Meet the others, if a launcher started any. On a CPU the ranks of a machine share its cores, unless `threads` is set."""
    if not announced():
        return ALONE
    _slurm_as_torchrun(os.environ)
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
    world, local_world = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if state.num_processes != world or torch.distributed.get_world_size() != world:
        raise RuntimeError(f"{world} ranks were started and {state.num_processes} met")
    if on_cpu and not threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    return Ranks(state.process_index, world, local_world)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that a rank starts and that is none itself."""
    told = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in environment.items() if k not in told and not k.startswith(("SLURM_STEP_", "TORCHELASTIC_"))}


def leave() -> None:
    """Part from the others, once there is nothing more to say. Without it a process that met some may abort at its end."""
    from accelerate import PartialState

    PartialState().destroy_process_group()


def _world(environment: Mapping[str, str]) -> int:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    return int(environment.get("SLURM_STEP_NUM_TASKS", 1))  # srun's alone: in a batch script before any srun there is one process


def _slurm_as_torchrun(environment: Any) -> None:
    """Slurm's words as torchrun's, where srun started this process and nobody else said anything."""
    if "RANK" in environment:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["LOCAL_WORLD_SIZE"] = str(tasks_by_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(20000 + (int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % _PORTS))


def first_host(nodes: str) -> str:
    """Of Slurm's list: `gpu[03-05,9],login` gives gpu03."""
    name = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if name is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodes} names no host; set MASTER_ADDR")
    return name[1] + (name[2] or "")


def tasks_by_node(counts: str) -> list[int]:
    """Of Slurm's `4(x2),3`: [4, 4, 3]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


# -- ranks of this job's own ------------------------------------------------------------------------------------------


def launch(count: int, module: str, argument: Path) -> None:
    """`count` ranks of `python -m module argument` on this machine, to their end. Raises what the first of them to fail did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mtptrain.signals import Interrupted, handlers_kept

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what failed is raised below
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SAVING_SECONDS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"mtptrain-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        with handlers_kept():
            elastic_launch(config, sys.executable)("-u", "-m", module, str(argument))
    except SignalException as ended:
        raise Interrupted(ended.sigval) from None
    except ChildFailedError as failed:
        raise _reason(*failed.get_first_failure(), count) from None


def _reason(rank: int, failure: Any, count: int) -> BaseException:
    """What the failure of a rank is to the process that started it (an elastic `ProcessFailure`)."""
    from mtptrain.signals import Interrupted

    told = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    status = failure.exitcode
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return Interrupted(status - 128)
    if status == 2:
        return UserError(told)
    if status < 0:
        name = signal.Signals(-status).name
        return UserError(
            f"rank {rank} of {count} was ended by {name}, as when memory runs out; the same command continues from the last checkpoint"
        )
    return RuntimeError(f"rank {rank} of {count} failed with status {status}\n{told}")


def run_as_rank(work: Callable[[], None]) -> int:
    """`work()` in a process that `launch` started; returns its exit status. What it raises is noted for `launch`, which tells it."""
    from mtptrain.signals import exit_status, handled

    end_with_parent()
    try:
        with handled():
            work()
            leave()
    except UserError as error:
        _note(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        return exit_status(interrupt)
    except Exception:
        time.sleep(1.0)  # the rank whose fault it is ends first, then those that miss it in the middle of a sum
        _note(traceback.format_exc())
        return 1
    return 0


def _note(message: str) -> None:
    """Where and as the elastic launcher expects it."""
    noted = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(noted), encoding="utf-8")


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, as after a kill -9 (Linux)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
