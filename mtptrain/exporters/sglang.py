"""SGLang's own EAGLE classes: LlamaForCausalLMEagle (--speculative-algorithm EAGLE) and LlamaForCausalLMEagle3 (EAGLE3).

As of 0.5.23. Tensor names that a class does not know, and those it misses, are passed over without a word, so each file holds exactly what
its class reads. Embeddings come from the target; so does the output projection of an EAGLE-1 head, and of an EAGLE-3 head whose
draft_vocab_size is null. Layer ids are of the layer that a stream leaves.

Source: sglang/srt/models/llama_eagle.py, llama_eagle3.py and llama.py, model_executor/model_runner_components/spec_aux_hidden_state.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.eagle_names import eagle3_tensors, eagle_tensors
from mtptrain.exporters.folder import Export
from mtptrain.exporters.llama import llama_config
from mtptrain.exporters.llama_limits import llama_limits
from mtptrain.exporters.vllm_eagle import entering, leaving
from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.heads.mtp import MtpConfig
from mtptrain.target.spec import TargetSpec

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""`dynamic` scales short texts too there, where transformers leaves them as they are."""


def why_not(config: Any, spec: TargetSpec) -> str | None:
    """The first thing of head or target that these classes have no place for; None where they fit."""
    if isinstance(config, MtpConfig):
        return "head.kind=mtp: MTP layers there are part of a target's checkpoint"
    return next(_reasons(config, spec), None)


def _reasons(config: Any, spec: TargetSpec) -> Iterator[str]:
    yield from llama_limits(config, spec, _ROPE_TYPES)
    last = f"after_{spec.num_layers - 1}"
    if isinstance(config, Eagle3Config) and last in config.captures:
        yield f"head.aux_captures={last}: states are captured where they enter a layer"


def to_sglang(head: Any, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None = None) -> Export:
    """The folder. Call only where `why_not` is None. `rows_DH`: as `eagle3_tensors` has it."""
    if isinstance(head, EagleHead):
        return _eagle(head, spec, dtype)
    assert isinstance(head, Eagle3Head)
    return _eagle3(head, spec, dtype, rows_DH)


def _eagle(head: EagleHead, spec: TargetSpec, dtype: torch.dtype) -> Export:
    """The class has a bias on fc, random until it is loaded: a head without one is given zeros."""
    config = llama_config(head.config.layer, spec, dtype) | {"architectures": ["LlamaForCausalLMEagle"]}
    no_bias = {"fc.bias": torch.zeros(spec.hidden_size, dtype=dtype)}
    return Export("sglang", config, no_bias | eagle_tensors(head, dtype))


def _eagle3(head: Eagle3Head, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None) -> Export:
    c = head.config
    targets_projection = head.lm_head is None and head.draft_ids is None
    config = llama_config(c.layer, spec, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None if targets_projection else c.draft_vocab_size,
        "target_hidden_size": spec.hidden_size,
        "eagle_aux_hidden_state_layer_ids": entering(c.captures),  # for readers that go by layers entered, as vLLM
        "num_aux_hidden_states": len(c.captures),
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": leaving(c.captures),
            "norm_before_fc": c.norm_before_fc,
        },
    }
    return Export("sglang", config, eagle3_tensors(head, dtype, rows_DH))
