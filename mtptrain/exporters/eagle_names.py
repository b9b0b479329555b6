"""EAGLE heads under the tensor names that SafeAILab's checkpoints introduced and engines read.

Pure functions head -> tensors and back. Legend: H hidden, V vocabulary, D draft vocabulary.
"""

import torch
from torch import Tensor

from mtptrain.heads.eagle import EagleHead
from mtptrain.heads.eagle3 import Eagle3Head

_LAYER = tuple(
    f"{name}.weight"
    for name in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        "post_attention_layernorm",
    )
)
D2T = "d2t"
"""int64 [D]: target id of row i minus i."""


def eagle_tensors(head: EagleHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """fc.weight (and fc.bias), layers.0.*; no norms but the one before the MLP."""
    own: dict[str, Tensor] = dict(head.named_parameters())
    tensors = {"fc.weight": own["fc.weight"]} | {f"layers.0.{name}": own[f"layer.{name}"] for name in _LAYER}
    if head.config.fc_bias:
        tensors["fc.bias"] = own["fc.bias"]
    return _plain(tensors, dtype)


def eagle_parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `eagle_tensors`: by our names."""
    own = {f"layer.{name}": tensors[f"layers.0.{name}"] for name in _LAYER}
    return own | {name: tensors[name] for name in ("fc.weight", "fc.bias") if name in tensors}


def eagle3_tensors(head: Eagle3Head, dtype: torch.dtype, rows_DH: Tensor | None = None) -> dict[str, Tensor]:
    """fc, midlayer.*, norm, lm_head and d2t (offsets), where the draft vocabulary is reduced.

    `rows_DH`: the target's rows of the draft vocabulary, for a head that drafts with them: an engine takes the target's lm_head from the
    target only where the vocabulary is whole.
    """
    own: dict[str, Tensor] = dict(head.named_parameters())
    tensors = {f"midlayer.{name}": own[f"layer.{name}"] for name in _LAYER}
    tensors |= {ours: own[ours] for ours in ("fc.weight", "norm.weight")}
    tensors |= {"midlayer.input_layernorm.weight": own["embed_norm.weight"], "midlayer.hidden_norm.weight": own["hidden_norm.weight"]}
    if head.input_norm is not None:
        tensors["input_norm.weight"] = own["input_norm.weight"]
    tensors |= {f"fc_norm.{i}.weight": own[f"fc_norms.{i}.weight"] for i in range(len(head.fc_norms))}
    if head.lm_head is not None:
        tensors["lm_head.weight"] = own["lm_head.weight"]
    named = _plain(tensors, dtype)
    if head.lm_head is None and head.draft_ids is not None:
        assert rows_DH is not None, "a head that drafts with some of the target's rows is exported with them"
        named["lm_head.weight"] = unchanged(rows_DH, dtype)
    if head.draft_ids is not None:
        named[D2T] = (head.draft_ids - torch.arange(len(head.draft_ids), device=head.draft_ids.device)).cpu()
    return named


def eagle3_parameters(tensors: dict[str, Tensor], head: Eagle3Head) -> dict[str, Tensor]:
    """The inverse of `eagle3_tensors`, as `head.state_dict()` has them."""
    own = {f"layer.{name}": tensors[f"midlayer.{name}"] for name in _LAYER}
    own |= {name: tensors[name] for name in ("fc.weight", "norm.weight")}
    own |= {"embed_norm.weight": tensors["midlayer.input_layernorm.weight"], "hidden_norm.weight": tensors["midlayer.hidden_norm.weight"]}
    if head.input_norm is not None:
        own["input_norm.weight"] = tensors["input_norm.weight"]
    own |= {f"fc_norms.{i}.weight": tensors[f"fc_norm.{i}.weight"] for i in range(len(head.fc_norms))}
    if head.lm_head is not None:
        own["lm_head.weight"] = tensors["lm_head.weight"]
    if head.draft_ids is not None:
        own["draft_ids"] = tensors[D2T] + torch.arange(len(tensors[D2T]))
    return own


def unchanged(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype` where that rounds nothing, else as it is: the target's own weights are not to be rounded."""
    cast = weight.detach().to("cpu", dtype)
    return (cast if torch.equal(cast.to(weight.dtype), weight.cpu()) else weight.detach().cpu()).contiguous()


def _plain(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", dtype).contiguous() for name, t in sorted(tensors.items())}
