"""Runs inside the engine's own Python: vLLM does one job of `engines/process.py`.

    python -m mtptrain.engines.vllm_worker FOLDER

Kinds of job (job.json; `llm` holds vLLM's own arguments):

    generate   every request answered; a row {"event": "response", "id", "tokens", "stopped", "trace"} each as it ends, then
               {"event": "run", "tokens", "seconds", "counters"}. `trace`: see vllm_trace.py; [] without speculation
    speed      the same requests at each of `batch_sizes`, only timed: {"event": "speed", "batch_size", "tokens", "seconds"}
    capture    hidden states of whole documents, a group of them (a shard) a file: {"event": "shard", "shard", "file"}
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Emit = Callable[..., None]


class Rows:
    """Appends rows to results.jsonl, each whole and at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: str, **values: Any) -> None:
        os.write(self._fd, (json.dumps({"event": event, **values}) + "\n").encode())


def main(folder: Path) -> int:
    _end_with_parent()
    emit = Rows(folder / "results.jsonl")
    try:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        KINDS[job["kind"]](folder, job, emit)
    except Exception as e:  # whatever it is, it is reported to the process that asked
        traceback.print_exc()
        emit("error", message=_one_line(e))
        return 1
    emit("done")
    return 0


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"[:500]


def _end_with_parent() -> None:
    """Standard input is a pipe that the parent holds: its end means that the parent is gone."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _requests(folder: Path) -> list[dict[str, Any]]:
    with open(folder / "requests.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def _load(job: dict[str, Any], emit: Emit) -> Any:
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=False, async_scheduling=False, **job["llm"])
    emit("loaded", seconds=time.monotonic() - began)
    return llm


def _submit(engine: Any, requests: list[dict[str, Any]], job: dict[str, Any]) -> None:
    """Requests hold `id`, `prompt` (token ids), `max_tokens` and, where sampled, `seed`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for request in requests:
        options = SamplingParams(
            temperature=job.get("temperature", 0.0),
            top_p=job.get("top_p", 1.0),
            seed=request.get("seed"),
            max_tokens=request["max_tokens"],
            stop_token_ids=job.get("stop_ids", []),
            ignore_eos=True,  # the stop ids are given, the engine knows no tokenizer
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, options)


def _finished(engine: Any) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from (output for output in engine.step() if output.finished)


def _generate(folder: Path, job: dict[str, Any], emit: Emit) -> None:
    from mtptrain.engines.vllm_trace import Trace, counters

    llm = _load(job, emit)
    engine = llm.llm_engine
    trace = Trace(engine) if job["llm"].get("speculative_config") else None
    requests = _requests(folder)
    before = counters(llm)
    began = time.monotonic()
    tokens = 0
    _submit(engine, requests, job)
    for output in _finished(engine):
        (answer,) = output.outputs
        tokens += len(answer.token_ids)
        emit(
            "response",
            id=output.request_id,
            tokens=list(answer.token_ids),
            stopped=answer.finish_reason == "stop",
            trace=trace.take(output.request_id) if trace else [],
        )
    seconds = time.monotonic() - began
    emit(
        "run",
        tokens=tokens,
        seconds=seconds,
        counters={k: _minus(v, before.get(k)) for k, v in counters(llm).items()},
        altered=trace.altered if trace else 0,
        versions=_versions(),
    )
    for size in job.get("batch_sizes", []):
        _time(engine, requests, size, job, emit)


def _time(engine: Any, requests: list[dict[str, Any]], size: int, job: dict[str, Any], emit: Emit) -> None:
    """`size` requests at once, all of them from the start to the last one's end."""
    some = [r | {"id": f"{r['id']}@{size}"} for r in requests[: max(size, 1)]]
    began = time.monotonic()
    _submit(engine, some, job)
    tokens = sum(len(output.outputs[0].token_ids) for output in _finished(engine))
    emit("speed", batch_size=size, requests=len(some), tokens=tokens, seconds=time.monotonic() - began)


def _capture(folder: Path, job: dict[str, Any], emit: Emit) -> None:
    """Requests hold `id`, `prompt` and `shard`; ids within a shard come back in the order given."""
    job["llm"]["worker_extension_cls"] = "mtptrain.engines.vllm_capture.CaptureExtension"
    llm = _load(job, emit)
    llm.collective_rpc("mtptrain_begin", args=(job["captures"],))
    engine = llm.llm_engine
    shards: dict[int, list[dict[str, Any]]] = {}
    for request in _requests(folder):
        shards.setdefault(request["shard"], []).append(request | {"max_tokens": 1})
    for shard, requests in shards.items():
        began = time.monotonic()
        _submit(engine, requests, job)
        for _ in _finished(engine):
            emit("progress")
        path = folder / f"{shard:05d}.safetensors"
        llm.collective_rpc("mtptrain_write", args=([r["id"] for r in requests], str(path)))
        emit("shard", shard=shard, file=str(path), seconds=time.monotonic() - began, versions=_versions())


def _minus(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [a - b for a, b in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0)


def _versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


KINDS: dict[str, Callable[[Path, dict[str, Any], Emit], None]] = {"generate": _generate, "capture": _capture}

if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # vLLM's own threads and processes would hold the interpreter
