"""Runs inside the engine's own Python: vLLM does the jobs of `engines/process.py`, each in a child forked after vLLM was imported.

    python -m mtptrain.engines.vllm_worker FOLDER

Kinds of job (jobs.json; `llm` holds vLLM's own arguments):

    generate   every request answered; a row {"event": "response", "id", "tokens", "stopped", "trace"} each as it ends, then
               {"event": "run", "tokens", "seconds", "counters"}. `trace`: see vllm_trace.py; [] without speculation. First, of each
               of `dialogues` ({"messages", "tools"}), the prompt that vLLM makes: {"event": "rendered", "tokens"}. Afterwards some
               requests again for each of `batch_sizes`, only timed: {"event": "speed", "batch_size", "tokens", "seconds"}
    answer     requests.0.jsonl, requests.1.jsonl, ... answered as they are written, each closed by {"event": "batch"}, until there is
               a file requests.end; rows, and `dialogues`, are those of `generate`
    capture    hidden states of whole documents, a batch of them a file: {"event": "states", "file"}
"""

import copy
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Emit = Callable[..., None]
_POLL_SECONDS = 0.05
_WARM_TOKENS = 12
_TIMED = 2
"""Requests that are timed at least, so that batch size 1 is more than one answer."""


class Rows:
    """Appends rows of one job to results.jsonl, each whole and at once."""

    def __init__(self, path: Path, job: str) -> None:
        self._fd, self._job = os.open(path, os.O_WRONLY | os.O_APPEND), job

    def __call__(self, event: str, **values: Any) -> None:
        os.write(self._fd, (json.dumps({"job": self._job, "event": event, **values}) + "\n").encode())


def main(folder: Path) -> int:
    _end_with_parent()
    results = folder / "results.jsonl"
    try:
        jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
        import vllm

        print(f"mtptrain: vLLM {vllm.__version__}", flush=True)
    except Exception as e:  # whatever it is, it is reported to the process that asked
        traceback.print_exc()
        Rows(results, "first")("error", message=_one_line(e))
        return 1
    for name, job in jobs.items():
        print(f"mtptrain: == {name}", flush=True)
        if (status := _in_child(folder, job, Rows(results, name))) != 0:
            return status
    Rows(results, "last")("all done")
    return 0


def _in_child(folder: Path, job: dict[str, Any], emit: Emit) -> int:
    """Run one job in a fork: its memory and its threads end with it."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            KINDS[job["kind"]](folder, job, emit)
        except BaseException as e:
            traceback.print_exc()
            emit("error", message=_one_line(e))
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # vLLM's own threads and processes would hold the interpreter
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        emit("error", message=f"its process was ended by {signal.Signals(-status).name} (out of memory?)")
    return status


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"[:500]


def _end_with_parent() -> None:
    """Standard input is a pipe that the parent holds: its end means that the parent is gone."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # this process leads the group: its children end too

    threading.Thread(target=wait, daemon=True).start()


def _requests(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def _load(job: dict[str, Any], emit: Emit) -> Any:
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=False, async_scheduling=False, **job["llm"])
    emit("loaded", seconds=time.monotonic() - began)
    return llm


def _render(llm: Any, job: dict[str, Any], emit: Emit) -> None:
    """The prompts that vLLM's chat calls make of the job's dialogues: {"event": "rendered", "tokens"} each, or `refused` and why."""
    if not job.get("dialogues"):
        return
    from vllm.renderers import ChatParams
    from vllm.renderers.registry import renderer_from_config

    config = copy.copy(llm.llm_engine.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.skip_tokenizer_init = False
    config.model_config.max_model_len = sys.maxsize  # nothing is generated: the engine's own limit would refuse long prompts
    renderer = renderer_from_config(config)
    for dialogue in job["dialogues"]:
        options = {"add_generation_prompt": True, "continue_final_message": False, "tools": dialogue["tools"], "tokenize": False}
        try:
            _, (prompt,) = renderer.render_chat([dialogue["messages"]], ChatParams(chat_template_kwargs=options))
            emit("rendered", tokens=list(prompt["prompt_token_ids"]))
        except Exception as e:  # a template raises what it likes
            emit("rendered", refused=_one_line(e))


def _submit(engine: Any, requests: list[dict[str, Any]], job: dict[str, Any]) -> None:
    """Requests hold `id`, `prompt` (token ids), `max_tokens` and, where sampled, `temperature`, `top_p` and `seed`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for request in requests:
        options = SamplingParams(
            temperature=request.get("temperature", 0.0),
            top_p=request.get("top_p", 1.0),
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
    _render(llm, job, emit)
    engine = llm.llm_engine
    trace = Trace(engine) if job["llm"].get("speculative_config") else None
    requests = _requests(folder / "requests.jsonl")
    before = counters(llm)
    began = time.monotonic()
    tokens = _answer_all(engine, requests, job, emit, trace)
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


def _answer_all(engine: Any, requests: list[dict[str, Any]], job: dict[str, Any], emit: Emit, trace: Any = None) -> int:
    """Emit every response as it ends; the number of generated tokens."""
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
    return tokens


def _batches(folder: Path, emit: Emit) -> Iterator[list[dict[str, Any]]]:
    """Requests, as they are handed over, until the end is."""
    number = 0
    while True:
        batch = folder / f"requests.{number}.jsonl"
        if batch.exists():
            yield _requests(batch)
            emit("batch", number=number)
            number += 1
        elif (folder / "requests.end").exists():
            return
        else:
            time.sleep(_POLL_SECONDS)


def _answer(folder: Path, job: dict[str, Any], emit: Emit) -> None:
    llm = _load(job, emit)
    _render(llm, job, emit)
    for requests in _batches(folder, emit):
        _answer_all(llm.llm_engine, requests, job, emit)


def _time(engine: Any, requests: list[dict[str, Any]], size: int, job: dict[str, Any], emit: Emit) -> None:
    """`size` requests at any moment until they run out, after a short untimed pass (what is compiled at first use is no speed)."""
    waiting = [r | {"id": f"{n}@{size}"} for n, r in zip(range(max(size, _TIMED)), itertools.cycle(requests), strict=False)]
    _submit(engine, [r | {"id": f"warm-{r['id']}", "max_tokens": min(_WARM_TOKENS, r["max_tokens"])} for r in waiting[:size]], job)
    for _ in _finished(engine):
        pass
    count, tokens = len(waiting), 0
    began = time.monotonic()
    _submit(engine, waiting[:size], job)
    del waiting[:size]
    for output in _finished(engine):
        tokens += len(output.outputs[0].token_ids)
        if waiting:
            _submit(engine, [waiting.pop(0)], job)
    emit("speed", batch_size=size, requests=count, tokens=tokens, seconds=time.monotonic() - began)


def _capture(folder: Path, job: dict[str, Any], emit: Emit) -> None:
    """A batch's states in one file, its prompts' one after the other."""
    job["llm"]["worker_extension_cls"] = "mtptrain.engines.vllm_capture.CaptureExtension"
    llm = _load(job, emit)
    llm.collective_rpc("mtptrain_begin", args=(job["captures"],))
    for number, requests in enumerate(_batches(folder, emit)):
        _submit(llm.llm_engine, [request | {"max_tokens": 1} for request in requests], job)
        for _ in _finished(llm.llm_engine):
            emit("progress")
        path = folder / f"{number:05d}.safetensors"
        llm.collective_rpc("mtptrain_write", args=([r["id"] for r in requests], str(path)))
        emit("states", file=str(path))


def _minus(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [a - b for a, b in zip(now, before or [0] * len(now), strict=True)]
    return now - (before or 0)


def _versions() -> dict[str, str]:
    import torch
    import transformers
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}


KINDS: dict[str, Callable[[Path, dict[str, Any], Emit], None]] = {"generate": _generate, "answer": _answer, "capture": _capture}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
