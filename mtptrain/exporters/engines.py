"""One exporter an engine: whether it can express a head, and the folder it loads."""

from collections.abc import Callable
from typing import Any

import torch

from mtptrain.config import Engine
from mtptrain.errors import UserError
from mtptrain.exporters import gguf, sglang, trtllm
from mtptrain.exporters.folder import Written
from mtptrain.exporters.hf import to_hf
from mtptrain.heads.drafter import Drafter
from mtptrain.target.spec import TargetSpec

_NAMES = {Engine.sglang: "SGLang", Engine.trtllm: "TensorRT-LLM", Engine.gguf: "llama.cpp"}
_REASONS: dict[Engine, Callable[[Any, TargetSpec], str | None]] = {
    Engine.sglang: sglang.why_not,
    Engine.trtllm: trtllm.why_not,
    Engine.gguf: gguf.why_not,
}
_MAKERS: dict[Engine, Callable[..., Written]] = {
    Engine.sglang: sglang.to_sglang,
    Engine.trtllm: trtllm.to_trtllm,
    Engine.gguf: gguf.to_gguf,
}


def refuse(engine: Engine, config: Any, spec: TargetSpec) -> None:
    """UserError where `engine` cannot express the head. vLLM has layouts and answers for itself (vllm.py)."""
    if engine in _REASONS and (reason := _REASONS[engine](config, spec)):
        raise UserError(f"export.engines={engine.name}: {_NAMES[engine]} cannot express this head ({reason}); leave {engine.name} out")


def to_engine(engine: Engine, drafter: Drafter, spec: TargetSpec, dtype: torch.dtype = torch.bfloat16) -> Written:
    """The folder for an engine other than vLLM."""
    head = drafter.head
    refuse(engine, head.config, spec)
    if engine is Engine.hf:
        return to_hf(head, spec, dtype)
    return _MAKERS[engine](head, spec, dtype, drafter.lm_head.weight_VH)
