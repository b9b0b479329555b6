"""TensorRT-LLM's Eagle3ForCausalLM (decoding_type Eagle3).

Embeddings come from the target; so does an lm_head that the file lacks. Layer ids are of the layer that a stream leaves, but the engine
does not read them from the folder: it takes layers 1, N//2-1 and N-4 unless the option `eagle3_layers_to_capture` of its speculative
config says otherwise. The ids in eagle_config are what that option must be.

Source: tensorrt_llm/_torch/models/modeling_speculative.py and modeling_auto.py, _torch/speculative/eagle3.py, and
_torch/attention/backends/interface.py (RoPE).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.eagle_names import D2T, eagle3_tensors
from mtptrain.exporters.folder import Export
from mtptrain.exporters.llama import llama_config
from mtptrain.exporters.llama_limits import llama_limits
from mtptrain.exporters.vllm_eagle import entering, leaving
from mtptrain.heads.eagle import EagleConfig
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.heads.mtp import MtpConfig
from mtptrain.target.spec import TargetSpec

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""`longrope` takes one of its two sets of factors for texts of every length, `dynamic` wants an alpha."""


def why_not(config: Any, spec: TargetSpec) -> str | None:
    """The first thing of head or target that this class has no place for; None where it fits."""
    if isinstance(config, MtpConfig):
        return "head.kind=mtp: MTP layers there are part of a target's checkpoint"
    if isinstance(config, EagleConfig):
        return "head.kind=eagle: of the EAGLE heads it loads eagle3 alone"
    return next(_reasons(config, spec), None)


def _reasons(config: Eagle3Config, spec: TargetSpec) -> Iterator[str]:
    yield from llama_limits(config, spec, _ROPE_TYPES)
    if config.fc_norm and config.norm_before_fc:
        yield "head.norm_before_fc=true: beside head.fc_norm=true the class leaves it out"


def to_trtllm(head: Any, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None = None) -> Export:
    """The folder. Call only where `why_not` is None. `rows_DH`: as `eagle3_tensors` has it."""
    assert isinstance(head, Eagle3Head)
    c = head.config
    config = llama_config(c.layer, spec, dtype)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": config["dtype"],
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": spec.hidden_size,
        "eagle_aux_hidden_state_layer_ids": entering(c.captures),  # for readers that go by layers entered, as vLLM
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": leaving(c.captures),
            "norm_before_fc": c.norm_before_fc,
            "return_hidden_post_norm": c.norm_output,  # what releases before norm_output read
        },
    }
    tensors = eagle3_tensors(head, dtype, rows_DH)
    if D2T in tensors:
        tensors[D2T] = tensors[D2T].to(torch.int32)
    return Export("trtllm", config, tensors)
