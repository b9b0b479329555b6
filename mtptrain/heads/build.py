"""Heads by kind: from the configuration, from a record of their shape, and their first weights."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mtptrain.config import HeadConfig, HeadKind
from mtptrain.errors import UserError
from mtptrain.heads.eagle import EagleConfig, EagleHead, eagle_config
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head, eagle3_config
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import LayerConfig, RmsNorm
from mtptrain.heads.mtp import MtpConfig, MtpHead, mtp_config
from mtptrain.target.spec import TargetSpec

_CLASSES: dict[HeadKind, tuple[type[Any], type[Any]]] = {
    HeadKind.mtp: (MtpConfig, MtpHead),
    HeadKind.eagle: (EagleConfig, EagleHead),
    HeadKind.eagle3: (Eagle3Config, Eagle3Head),
}


def build_head(head: HeadConfig, spec: TargetSpec, draft_ids: Tensor | None = None) -> DraftHead:
    """A head of the target's sizes. `draft_ids`, int64 ascending: the draft vocabulary of an eagle3 head; None: the whole."""
    if head.kind is HeadKind.mtp:
        return MtpHead(mtp_config(head, spec))
    if head.kind is HeadKind.eagle:
        return EagleHead(eagle_config(head, spec))
    size = spec.vocab_size if draft_ids is None else len(draft_ids)
    built = Eagle3Head(eagle3_config(head, spec, size))
    if built.draft_ids is not None and draft_ids is not None:
        built.draft_ids.copy_(draft_ids)
    return built


def head_shape(head: HeadConfig, spec: TargetSpec) -> Any:
    """The head's config object before it is built, its draft vocabulary taken for whole: enough to say which engine can express it."""
    if head.kind is HeadKind.mtp:
        return mtp_config(head, spec)
    return eagle_config(head, spec) if head.kind is HeadKind.eagle else eagle3_config(head, spec, spec.vocab_size)


def kind_of(head: DraftHead) -> HeadKind:
    return next(kind for kind, (_, cls) in _CLASSES.items() if type(head) is cls)


def head_record(head: DraftHead) -> dict[str, Any]:
    """The head's shape as JSON: kind and config."""
    return {"kind": kind_of(head).name, **asdict(head.config)}


def head_from_record(record: dict[str, Any]) -> DraftHead:
    """The head a record describes, its weights not yet set."""
    values = dict(record)
    config, cls = _CLASSES[HeadKind[values.pop("kind")]]
    return cls(config(layer=LayerConfig(**values.pop("layer")), **values))


def init_lm_head(head: DraftHead, lm_head_VH: Tensor) -> None:
    """A head's own output projection starts as the target's rows."""
    if head.lm_head is not None:
        with torch.no_grad():
            head.lm_head.weight.copy_(lm_head_VH if head.draft_ids is None else lm_head_VH[head.draft_ids.to(lm_head_VH.device)])


def init_from_last_layer(head: DraftHead, spec: TargetSpec, layer: dict[str, Tensor], final_norm_H: Tensor) -> None:
    """Decoder layer and norms from the target's last layer and final norm; call after `init_random`.

    `layer` maps names inside the layer to tensors; all else stays as `init_random` made them. Raises UserError
    where the target's layer has other parts than the head's.
    """
    if head.layer.config.attention_input:
        raise UserError("head.init=last_layer: q, k and v of this head read two states, the target's one; use head.init=random")
    if spec.hidden_act not in ("silu", "swish"):
        raise UserError(f"head.init=last_layer: the target's activation is {spec.hidden_act}, the head's is silu; use head.init=random")
    own = dict(head.layer.named_parameters())
    switched_off = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    if missing := sorted(set(layer) - set(own) - switched_off):
        raise UserError(f"head.init=last_layer: the target's last layer has {missing[0]}, which the head has not; use head.init=random")
    if absent := sorted(set(own) - set(layer)):
        raise UserError(f"head.init=last_layer: the target's last layer lacks {absent[0]}; use head.init=random")
    with torch.no_grad():
        for name, parameter in own.items():
            offset = spec.rms_norm_offset if "norm" in name else 0.0
            parameter.copy_(layer[name].float() + offset)
        if isinstance(norm := getattr(head, "norm", None), RmsNorm):
            norm.weight.copy_(final_norm_H.float() + spec.rms_norm_offset)
