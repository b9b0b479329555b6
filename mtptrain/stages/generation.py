"""The target as a generator: transformers here, an engine, or workers on Ray that each have one of these."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from mtptrain.config import Config, Executor, PrecomputeBackend, ResponseBackend
from mtptrain.data.documents import Document
from mtptrain.data.responses import Completed, HfGenerator, Request
from mtptrain.engines.process import require_engine
from mtptrain.engines.vllm import VllmGenerator, llm_arguments
from mtptrain.pool import Pool, chunks, resources, spread_config
from mtptrain.stages.audit import sample, score
from mtptrain.stages.rendering import Rendering, compare
from mtptrain.target.model import load_model, pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec

_ROUNDS, _PARTS = 4, 2
"""A part of the prompts that a worker is given at a time has at most so many times its slots, and each worker at least so many parts."""
_Asked = tuple[list[Request], tuple[Any, ...]]
"""Requests, and with which options they are answered."""


class Target:
    """The target as a generator, loaded (or its engine started) when something must be generated and not before."""

    engine_folder = "engine"

    def __init__(self, cfg: Config, folder: Path, stop_ids: list[int], dialogues: Sequence[Rendering]) -> None:
        self.cfg, self.folder, self.stop_ids, self.dialogues = cfg, folder, stop_ids, dialogues
        self._model: PreTrainedModel | None = None
        self._vllm: VllmGenerator | None = None
        self._pool: Pool[_Asked, list[Completed]] | None = None

    def answer(self, requests: Sequence[Request]) -> Iterable[list[Completed]]:
        """Assistant turns, by data.responses."""
        o = self.cfg.data.responses
        return self.generate(requests, o.max_new_tokens, o.temperature, o.top_p)

    def answer_greedily(self, requests: Sequence[Request]) -> Iterable[list[Completed]]:
        """Assistant turns as the walk and the engine measure them."""
        return self.generate(requests, self.cfg.data.responses.max_new_tokens, 0.0, 1.0)

    def write(self, requests: Sequence[Request]) -> Iterable[list[Completed]]:
        """User turns, by data.self_prompts."""
        o = self.cfg.data.self_prompts
        return self.generate(requests, o.max_new_tokens, o.temperature, o.top_p)

    def audit(self, documents: Sequence[Document]) -> dict[str, Any] | None:
        """Whether a sample of the responses is the target's own; None where transformers never runs it, or there is nothing to score."""
        self._close(failed=False)
        chosen = sample(documents, self.cfg.data.audit_documents)
        local = self.cfg.precompute.backend is PrecomputeBackend.hf
        return score(self._loaded(), read_spec(self.folder), chosen) if local and chosen else None

    def rendering(self) -> dict[str, Any] | None:
        """Whether the engine makes the dialogues' prompts as the tokenizer does; None where no engine answered."""
        return compare(self.dialogues, self._vllm.rendered if self._vllm else [])

    def generate(self, requests: Sequence[Request], max_new_tokens: int, temperature: float, top_p: float) -> Iterable[list[Completed]]:
        if self.cfg.data.responses.executor is Executor.ray:
            return self._by_workers(requests, max_new_tokens, temperature, top_p)
        if self.cfg.data.responses.backend is ResponseBackend.vllm:
            return self._engine().run(requests, max_new_tokens, temperature, top_p)
        generator = HfGenerator(
            self._loaded(),
            self.stop_ids,
            batch_size=self.cfg.data.responses.batch_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=self.cfg.seed,
        )
        return generator.run(requests)

    def _by_workers(self, requests: Sequence[Request], *options: Any) -> Iterator[list[Completed]]:
        """In parts that keep every slot of a worker busy for a while, and few enough that all workers have some."""
        o, workers = self.cfg.data.responses, self.cfg.ray.workers
        if self._pool is None:
            cpus, gpus = resources(self.cfg, gpus=self.cfg.engine.tensor_parallel if o.backend is ResponseBackend.vllm else 1)
            self._pool = Pool(self.cfg.ray, partial(_Answerer, spread_config(self.cfg), self.stop_ids), cpus, gpus).__enter__()
        size = max(1, min(_ROUNDS * o.batch_size, -(-len(requests) // (_PARTS * workers))))
        for _, answers in self._pool.run([(part, options) for part in chunks(requests, size)]):
            yield answers

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            set_threads(self.cfg.threads)
            device = pick_device(self.cfg.device)
            self._model = load_model(self.folder, pick_dtype(self.cfg.target.dtype, device), device, self.cfg.target.trust_remote_code)
        return self._model

    def _engine(self) -> VllmGenerator:
        if self._vllm is None:
            engine = require_engine(self.cfg, "data.responses.backend=vllm")
            arguments = llm_arguments(self.cfg, self.folder, read_spec(self.folder), self.cfg.data.max_length)
            arguments["max_num_seqs"] = self.cfg.data.responses.batch_size
            asked = [d.asked() for d in self.dialogues]
            self._vllm = VllmGenerator(self.cfg, engine, self.cfg.data_dir / self.engine_folder, arguments, self.stop_ids, asked)
        return self._vllm

    def _close(self, failed: bool) -> None:
        """Engine and workers."""
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None
        if self._vllm is not None:
            self._vllm.close(failed)
            self._vllm = None

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(failed=kind is not None)
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Answerer:
    """A worker's own target."""

    def __init__(self, cfg: Config, stop_ids: list[int], number: int) -> None:
        here = replace(
            cfg, threads=max(1, cfg.threads), data=replace(cfg.data, responses=replace(cfg.data.responses, executor=Executor.local))
        )
        self._target = Target(here, resolve_target(cfg.target), stop_ids, [])
        self._target.engine_folder = f"engine-{number}"

    def __call__(self, asked: _Asked) -> list[Completed]:
        requests, options = asked
        return [answer for batch in self._target.generate(requests, *options) for answer in batch]
