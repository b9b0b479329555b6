"""What the stages ask of vLLM: answers, hidden states, and trials of a draft. Each call is one process of the engine (process.py)."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from mtptrain.config import Config
from mtptrain.data.responses import Completed, Request
from mtptrain.engines.process import Engine, EngineProcess, run_engine, write_requests
from mtptrain.errors import UserError
from mtptrain.target.model import pick_device, pick_dtype
from mtptrain.target.spec import TargetSpec

_GPU_SHARE = 0.9
_GPU_SPARE = 0.03
_PREFILL_TOKENS = 4096
"""Of one step, where prompts are not split."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One request: token ids and the most tokens to generate."""

    id: str
    tokens: list[int]
    max_tokens: int


@dataclass(slots=True)
class Step:
    """One decode step of a request: the row its draft started from, what was drafted (maybe nothing), how much was accepted."""

    row: int
    drafted: list[int]
    accepted: int


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    """Generated ids, the end marker included where one was produced."""
    stopped: bool
    steps: list[Step]


@dataclass(slots=True)
class EngineRun:
    """One engine over all prompts."""

    answers: dict[str, Answer] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    """From the first prompt's submission to the last answer, without loading."""
    load_seconds: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)
    """drafts, draft_tokens, accepted, accepted_per_position, as vLLM counts them."""
    altered: int = 0
    """Drafts the scheduler changed after the drafter proposed them."""
    speed: list[dict[str, Any]] = field(default_factory=list)
    """Rows of batch_size, requests, tokens, seconds."""
    rendered: list[list[int] | str] = field(default_factory=list)
    """Of each of the job's dialogues the prompt's tokens, or why the engine refused it."""
    versions: dict[str, str] = field(default_factory=dict)


def llm_arguments(
    cfg: Config, target: Path, spec: TargetSpec, longest: int, speculative: dict[str, Any] | None = None, eager: bool = False
) -> dict[str, Any]:
    """Arguments of vLLM's LLM class. `longest`: tokens of the longest sequence, prompt and answer.

    The context is longer where the target allows it: vLLM drafts nothing, for no request of the batch, once one of them has less room
    than a verification of K drafted tokens and K more.
    """
    device = pick_device(cfg.device)
    room = 2 * (speculative or {}).get("num_speculative_tokens", 0) + 2
    arguments: dict[str, Any] = {
        "model": str(target.resolve()),
        "dtype": engine_dtype(cfg),
        "max_model_len": min(longest + room, spec.max_position_embeddings),
        "max_num_seqs": cfg.engine.batch_size,
        "tensor_parallel_size": cfg.engine.tensor_parallel,
        "enforce_eager": eager or device.type == "cpu",
        "trust_remote_code": cfg.target.trust_remote_code,
        "seed": 0,
    }
    if device.type == "cuda":
        arguments["gpu_memory_utilization"] = _free_share(device)
    if speculative:
        arguments["speculative_config"] = speculative
    return arguments | cfg.engine.options


def _free_share(device: torch.device) -> float:
    """What the engine may take of the GPU while this process keeps the target's ends and the head on it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return min(_GPU_SHARE, free / total - _GPU_SPARE)


def engine_dtype(cfg: Config) -> str:
    """The compute dtype of the target, as vLLM names it."""
    return str(pick_dtype(cfg.target.dtype, pick_device(cfg.device))).removeprefix("torch.")


def answer_job(
    arguments: dict[str, Any],
    prompts: Sequence[Prompt],
    stop_ids: Iterable[int],
    batch_sizes: Sequence[int] = (),
    dialogues: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A job that answers every prompt greedily, and renders dialogues ({"messages", "tools"}). UserError for a prompt that does not fit."""
    for prompt in prompts:
        if len(prompt.tokens) + prompt.max_tokens > arguments["max_model_len"]:
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.tokens)} + {prompt.max_tokens} tokens exceed the context of {arguments['max_model_len']}"
            )
    return {
        "kind": "generate",
        "llm": arguments,
        "stop_ids": sorted(stop_ids),
        "batch_sizes": list(batch_sizes),
        "dialogues": list(dialogues),
    }


def answer(
    cfg: Config, engine: Engine, folder: Path, jobs: dict[str, dict[str, Any]], prompts: Sequence[Prompt]
) -> Iterator[tuple[str, str, Answer] | tuple[str, EngineRun]]:
    """(job, prompt id, answer) as they end, each once, and after a job's last (job, its whole run)."""
    requests = ({"id": p.id, "prompt": p.tokens, "max_tokens": p.max_tokens} for p in prompts)
    run, name = EngineRun(), ""
    for row in run_engine(cfg, engine, folder, jobs, requests):
        if row["job"] != name:
            if name:
                yield name, run
            run, name = EngineRun(), row["job"]
        match row["event"]:
            case "loaded":
                run.load_seconds = row["seconds"]
            case "rendered":
                run.rendered.append(_rendered(row))
            case "response":
                run.answers[row["id"]] = Answer(row["tokens"], row["stopped"], [Step(*step) for step in row["trace"]])
                yield name, row["id"], run.answers[row["id"]]
            case "run":
                run.tokens, run.seconds, run.counters = row["tokens"], row["seconds"], row["counters"]
                run.altered, run.versions = row["altered"], row["versions"]
            case "speed":
                run.speed.append({k: row[k] for k in ("batch_size", "requests", "tokens", "seconds")})
    yield name, run


def _rendered(row: dict[str, Any]) -> list[int] | str:
    return row["tokens"] if "tokens" in row else row["refused"]


def run_to_end(
    label: str, count: int, events: Iterator[tuple[str, str, Answer] | tuple[str, EngineRun]], keep: Callable[[str, EngineRun], None]
) -> None:
    """Follow `answer` with a progress bar; `keep` gets each job's run as soon as it is whole. `count`: answers of all jobs."""
    with tqdm(total=count, desc=label, unit="resp", mininterval=1) as bar:
        for event in events:
            bar.set_postfix_str(event[0], refresh=False)
            if len(event) == 2:
                keep(*event)
            else:
                bar.update()


class _Batches:
    """An engine process that is given batches of requests, from now to `close`."""

    def __init__(self, cfg: Config, engine: Engine, folder: Path, job: dict[str, Any]) -> None:
        self._folder, self._batches = folder, 0
        self._process = EngineProcess(cfg, engine, folder, {job["kind"]: job}, [])
        self._process.__enter__()

    def _ask(self, requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The rows that a batch brings about."""
        write_requests(self._folder / f"requests.{self._batches}.jsonl", requests)
        self._batches += 1
        return self._process.rows("batch")

    def close(self, failed: bool = False) -> None:
        """End the engine; at once where something failed."""
        if not failed:
            (self._folder / "requests.end").touch()
            list(self._process.rows("all done"))
        self._process.__exit__(RuntimeError if failed else None, None, None)


class VllmGenerator(_Batches):
    """Answers requests, as data/responses.py's generator does."""

    def __init__(
        self,
        cfg: Config,
        engine: Engine,
        folder: Path,
        arguments: dict[str, Any],
        stop_ids: Sequence[int],
        dialogues: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._seed = cfg.seed
        self.rendered: list[list[int] | str] = []
        """Of each of the dialogues ({"messages", "tools"}), once something was answered: the prompt's tokens, or why it was refused."""
        if pick_device(cfg.device).type == "cpu":  # vLLM sets a request's random stream back after a part of its prompt; a CPU's it cannot
            whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(_PREFILL_TOKENS, arguments["max_model_len"])}
            arguments = whole | arguments
        job = {"kind": "answer", "llm": arguments, "stop_ids": sorted(stop_ids), "dialogues": list(dialogues)}
        super().__init__(cfg, engine, folder, job)

    def run(self, requests: Sequence[Request], max_new_tokens: int, temperature: float, top_p: float) -> Iterator[list[Completed]]:
        """Sequences as they end, in any order, each once. Sampled ones draw from a stream that belongs to (seed, request id)."""
        rows = [
            {
                "id": r.id,
                "prompt": r.prompt,
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "seed": random.Random(f"{self._seed}/{r.id}").getrandbits(62) if temperature else None,
            }
            for r in requests
        ]
        for row in self._ask(rows):
            if row["event"] == "rendered":
                self.rendered.append(_rendered(row))
            elif row["event"] == "response":
                yield [Completed(row["id"], row["tokens"], hit_limit=not row["stopped"])]


class VllmCapturer(_Batches):
    """The states of an engine's own prefill. Made, it is loaded."""

    def __init__(self, cfg: Config, engine: Engine, folder: Path, arguments: dict[str, Any], captures: Sequence[str]) -> None:
        super().__init__(cfg, engine, folder, {"kind": "capture", "llm": arguments, "captures": list(captures)})
        try:
            list(self._process.rows("loaded"))
        except BaseException:
            self.close(failed=True)
            raise

    def states(self, documents: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Of each capture bf16 [N, H]: of the documents' tokens, one after the other."""
        (row,) = [row for row in self._ask({"id": str(i), "prompt": list(d)} for i, d in enumerate(documents)) if row["event"] == "states"]
        path = Path(row["file"])
        states = load_file(path)
        path.unlink()
        return states
