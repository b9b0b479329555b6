"""vLLM's own EAGLE classes: EagleLlamaForCausalLM (method eagle) and Eagle3LlamaForCausalLM (method eagle3).

Pure functions head -> (config.json, tensors). Embeddings, and an lm_head over the whole vocabulary that is the target's, are left out:
vLLM takes them from the target.
"""

from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.eagle_names import eagle3_tensors, eagle_tensors
from mtptrain.exporters.llama import llama_config
from mtptrain.heads.eagle import EagleConfig, EagleHead
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.target.spec import TargetSpec


def why_not(config: EagleConfig | Eagle3Config, spec: TargetSpec) -> str | None:
    """The first thing of head or target that these classes have no place for; None where they fit."""
    if spec.embed_scale != 1.0:
        return f"embed_scale={spec.embed_scale:g}: the class applies none"
    if isinstance(config, EagleConfig) and config.fc_bias:
        return "head.fc_bias=true: the class has no bias on fc"
    if config.layer.sliding_window != (spec.sliding_window or 0):
        return f"head.sliding_window={config.layer.sliding_window}: the class has the target's window, {spec.sliding_window or 0}"
    return None


def to_eagle(head: EagleHead, spec: TargetSpec, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors. Call only where `why_not` is None."""
    return llama_config(head.config.layer, spec, dtype), eagle_tensors(head, dtype)


def to_eagle3(
    head: Eagle3Head, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors. Call only where `why_not` is None."""
    c = head.config
    config = llama_config(c.layer, spec, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": spec.hidden_size,
        "eagle_aux_hidden_state_layer_ids": entering(c.captures),
        "num_aux_hidden_states": len(c.captures),  # what the class sizes fc by
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": c.norm_before_fc},
    }
    return config, eagle3_tensors(head, dtype, rows_DH)


def to_speculators(
    head: Eagle3Head, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None, k: int, target: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same in the config of the speculators library, whose norm_before_residual is true where it is not written.

    `target`: path or hub id of the verifier, which `vllm serve FOLDER` then loads by itself.
    """
    raw, tensors = to_eagle3(head, spec, dtype, rows_DH)
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    if head.draft_ids is not None:
        chosen_V = torch.zeros(spec.vocab_size, dtype=torch.bool)
        chosen_V[head.draft_ids.cpu()] = True
        renamed["t2d"] = chosen_V
    layer = {key: raw[key] for key in llama_config(head.config.layer, spec, dtype)}
    kept = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "dtype": raw["dtype"],
        "tie_word_embeddings": False,
        # vLLM takes the layer's config for the draft's: the only way to tell it a number of streams other than three
        "transformer_layer_config": layer | {"num_aux_hidden_states": raw["num_aux_hidden_states"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }
    return config | {key: raw[key] for key in (*kept, *norms)}, dict(sorted(renamed.items()))


def entering(captures: list[str]) -> list[int]:
    """vLLM's ids of captures: it names the stream by the layer it enters."""
    return [layer + 1 for layer in leaving(captures)]


def leaving(captures: list[str]) -> list[int]:
    """SGLang's and TensorRT-LLM's ids: of the layer a stream leaves."""
    return [int(name.removeprefix("after_")) for name in captures]
