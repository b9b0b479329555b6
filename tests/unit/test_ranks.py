"""Who a rank is by its environment, and how work is shared."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtptrain.errors import UserError
from mtptrain.ranks import ALONE, Ranks, _slurm_as_torchrun, announced, first_host, tasks_by_node
from mtptrain.stepper import Stepper
from mtptrain.zero import ZeroStepper


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_every_item_is_shared_out_once_and_comes_back_in_order(items: list[int], world: int) -> None:
    parts = [Ranks(rank, world).share(items) for rank in range(world)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1

    class Met(Ranks):
        __slots__ = ()

        def gather(self, value: Any) -> list[Any]:
            return parts

    assert Met(0, world).unshare(parts[0]) == items


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_partitioned_optimizer_has_every_rank_take_as_many_turns(batches: int, world: int) -> None:
    def turns(kind: type[Stepper], rank: int) -> Sequence[int | None]:
        stepper = object.__new__(kind)
        stepper._ranks = Ranks(rank, world)
        return stepper.turns(batches)

    zero = [turns(ZeroStepper, rank) for rank in range(world)]
    assert len({len(part) for part in zero}) == 1
    assert sorted(n for part in zero for n in part if n is not None) == list(range(batches))
    assert sorted(n for rank in range(world) for n in turns(Stepper, rank) if n is not None) == list(range(batches))


def test_alone_nothing_is_asked_of_anyone() -> None:
    assert ALONE.gather("x") == ["x"]
    assert ALONE.first(lambda: 3) == 3
    assert ALONE.unshare([1, 2]) == [1, 2]
    with pytest.raises(UserError):
        ALONE.first(lambda: _refuse())


def _refuse() -> None:
    raise UserError("no")


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False),  # a batch script, before any srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_launcher_is_known_by_its_words(environment: dict[str, str], several: bool) -> None:
    assert announced(environment) is several


def test_what_srun_says_becomes_what_torchrun_would_say() -> None:
    environment = {
        "SLURM_PROCID": "9",
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        "SLURM_STEP_NODELIST": "gpu[03-04,11]",
        "SLURM_JOB_ID": "16390",
        "SLURM_STEP_ID": "2",
    }
    _slurm_as_torchrun(environment)
    assert {k: v for k, v in environment.items() if not k.startswith("SLURM")} == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20008",
    }
    of_torchrun = {"RANK": "0", "SLURM_PROCID": "5"}
    _slurm_as_torchrun(of_torchrun)
    assert of_torchrun == {"RANK": "0", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[03-05,9],login", "gpu03"), ("node1", "node1"), ("a-b-7,c", "a-b-7"), ("n[1,3-4]", "n1"), ("x[001]", "x001")]
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_by_node() -> None:
    assert tasks_by_node("4(x2),3") == [4, 4, 3]
    assert tasks_by_node("1") == [1]
