"""`plan.measure=true`: small pieces of each stage run for real, each in a process of its own; what they take and hold is the plan's.

The pieces have the run's own target, batch sizes, head and codecs; their tokens are random. T tokens of a document.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mtptrain import manifest
from mtptrain.config import Config, HeadInit, PrecomputeBackend, ResponseBackend
from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.data.responses import HfGenerator, Request
from mtptrain.estimate import Plan
from mtptrain.files import hash_json
from mtptrain.peak import peak_bytes
from mtptrain.stages.capture import Work, codecs
from mtptrain.stages.context import open_context, open_store, wanted_captures
from mtptrain.stages.first_weights import initial_head
from mtptrain.stages.precompute import open_maker
from mtptrain.stages.train import make_trainer, training_documents
from mtptrain.store.format import FINAL
from mtptrain.store.writer import StoreWriter
from mtptrain.target.model import load_model, pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec

_STEPS = (4, 12)
"""Tokens a sequence writes in the first and in the second measurement: their difference is what a step takes."""
_SHARDS, _PACKS = 3, 4
"""Shards that are made, and forwards each has; the first shard is not timed."""
_UPDATES, _WARM = 6, 2
_UNREAD = 1.15
"""Documents beyond those that the updates need."""


@dataclass(slots=True, frozen=True)
class Measured:
    """Of one stage."""

    tokens_per_second: float
    memory: int
    """Bytes at the peak: of the process, or of the GPU."""


@dataclass(slots=True, frozen=True)
class Sample:
    """What documents of the run are like: tokens of prompt and answer."""

    prompt: int
    answer: int

    @classmethod
    def of(cls, cfg: Config, plan: Plan) -> "Sample":
        documents = max(1, plan.volume.documents)
        length = max(4, plan.volume.tokens // documents)
        answer = min(length - 2, max(2, plan.volume.supervised // documents))
        return cls(length - answer, answer)


def measure(cfg: Config, plan: Plan) -> dict[str, Measured]:
    """By stage; those that cannot be measured in a short time, or have nothing to do, are missing. Raises UserError."""
    target = resolve_target(cfg.target)  # fetched once, here
    cfg = replace(cfg, target=replace(cfg.target, path=str(target)))
    sample = Sample.of(cfg, plan)
    probes: dict[str, Callable[[Config, Plan, Sample], float]] = {"precompute": _precompute, "train": _train}
    if plan.volume.generated and cfg.data.responses.backend is ResponseBackend.hf:
        probes = {"prepare": _prepare} | probes
    if cfg.precompute.backend is not PrecomputeBackend.hf:
        del probes["precompute"]
    found = {}
    for stage, probe in probes.items():
        found[stage] = Measured(*_apart(probe, cfg, plan, sample))
    return found


def _apart(probe: Callable[..., float], *arguments: Any) -> tuple[float, int]:
    """What `probe` returns in a process of its own, and what that held at most."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_peak, probe, arguments).result()


def _with_peak(probe: Callable[..., float], arguments: tuple[Any, ...]) -> tuple[float, int]:
    rate = probe(*arguments)
    return rate, torch.cuda.max_memory_allocated() if pick_device(arguments[0].device).type == "cuda" else peak_bytes()


def _prepare(cfg: Config, plan: Plan, sample: Sample) -> float:
    """Generated tokens a second of the whole stage: prompts first, then steps of full slots, and at the end of emptying ones."""
    set_threads(cfg.threads)
    device, options = pick_device(cfg.device), cfg.data.responses
    model = load_model(Path(cfg.target.path), pick_dtype(cfg.target.dtype, device), device, cfg.target.trust_remote_code)
    count = min(options.batch_size, max(1, plan.volume.documents))
    middle = sample.prompt + sample.answer // 2
    seconds = []
    for steps in _STEPS:
        random = torch.Generator().manual_seed(0)
        prompts = torch.randint(plan.spec.vocab_size, (count, middle), generator=random).tolist()
        generator = HfGenerator(
            model,
            [],
            batch_size=options.batch_size,
            max_new_tokens=steps,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=0,
        )
        began = time.perf_counter()
        list(generator.run([Request(str(i), prompt) for i, prompt in enumerate(prompts)]))
        seconds.append(time.perf_counter() - began)
    step = max(1e-9, (seconds[1] - seconds[0]) / (_STEPS[1] - _STEPS[0]))
    prompt_token = max(0.0, seconds[0] - _STEPS[0] * step) / (count * middle)
    prompts_seconds = plan.volume.documents * sample.prompt * prompt_token
    full = plan.volume.generated / count + sample.answer / 2  # the last ones leave slots empty
    return plan.volume.generated / (prompts_seconds + full * step)


def _documents(plan: Plan, sample: Sample, count: int, split: str, first: int = 0) -> list[Document]:
    """Random ones, that hold as many different ids as they can."""
    random = torch.Generator().manual_seed(first)
    length, size = sample.prompt + sample.answer, plan.spec.vocab_size
    order = torch.randperm(size, generator=random)
    return [
        Document(
            id=f"{first + i}",
            source="random",
            split=split,
            tokens=order[torch.arange(i * length, (i + 1) * length) % size].tolist(),
            spans=[(sample.prompt, length)],
        )
        for i in range(count)
    ]


def _precompute(cfg: Config, plan: Plan, sample: Sample) -> float:
    set_threads(cfg.threads)
    spec = read_spec(Path(cfg.target.path))
    captures = list(dict.fromkeys((*cfg.precompute.captures, *wanted_captures(cfg, spec))))
    length = sample.prompt + sample.answer
    each = max(1, _PACKS * cfg.precompute.batch_tokens // length)
    with TemporaryDirectory(prefix="mtptrain-plan-") as folder:
        writer = StoreWriter(Path(folder), hash_json("plan"), *codecs(cfg.store))
        work = [Work(shard=i, documents=_documents(plan, sample, each, TRAIN, i * each), captures=captures) for i in range(_SHARDS)]
        with open_maker(cfg, writer, work[:1], length, lambda tokens: None) as make:
            list(make(work[:1]))
            began = time.perf_counter()
            list(make(work[1:]))
            return sum(w.tokens for w in work[1:]) / (time.perf_counter() - began)


def _train(cfg: Config, plan: Plan, sample: Sample) -> float:
    """Tokens a second of updates, on states that are random as well."""
    with TemporaryDirectory(prefix="mtptrain-plan-") as folder:
        train = replace(cfg.train, epochs=1, max_updates=_UPDATES + _WARM, online=False, shuffle_shards=None)
        cfg = replace(
            cfg,
            root=folder,
            name="plan",
            train=train,
            head=replace(cfg.head, init=HeadInit.random, checkpoint=None),
        )
        context = open_context(cfg)
        captures = list(dict.fromkeys((FINAL, *wanted_captures(cfg, context.spec))))
        length = sample.prompt + sample.answer
        needed = (_UPDATES + _WARM) * train.batch_tokens * train.accumulate
        needed = max(needed, (cfg.train.loss.vocabulary or 0) * length // sample.answer)
        documents = [
            *_documents(plan, sample, max(2, int(_UNREAD * needed / length)), TRAIN),
            *_documents(plan, sample, 1, HELD_OUT),
        ]
        _random_states(cfg, documents, captures, context.spec.hidden_size)
        store = open_store(cfg, captures)
        chosen = training_documents(store)
        head = initial_head(cfg, context, store, chosen)
        trainer = make_trainer(cfg, context, store, chosen, head, lambda _: {}, lambda _: None)
        tokens = began = 0.0
        for number, batches in enumerate(trainer.updates):
            if number == _WARM:
                tokens, began = 0.0, time.perf_counter()
            trainer.update(batches)
            tokens += sum(store.entries[i].length for batch in batches for i in batch)
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        return tokens / (time.perf_counter() - began)


def _random_states(cfg: Config, documents: list[Document], captures: list[str], hidden_size: int) -> None:
    writer = StoreWriter(cfg.store_dir, hash_json({}), *codecs(cfg.store))
    for shard, split in enumerate((TRAIN, HELD_OUT)):
        members = [d for d in documents if d.split == split]
        tokens = sum(len(d.tokens) for d in members)
        writer.write(shard, members, {c: torch.randn(tokens, hidden_size).bfloat16() for c in captures})
    manifest.finish(cfg.store_dir, {}, {"captures": writer.made(captures), "shards": 2})
