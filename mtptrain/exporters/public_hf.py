"""Our own `hf` export (hf.py), checked before it is built."""

import math
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

import torch

from mtptrain.exporters.hf import KEY
from mtptrain.exporters.public_checkpoint import UNTRUSTED, Checkpoint, check_rope
from mtptrain.heads.build import head_from_record
from mtptrain.heads.eagle3 import Eagle3Config
from mtptrain.heads.head import DraftHead
from mtptrain.target.ends import TargetEnds
from mtptrain.target.spec import TargetSpec

_IDS = "draft_ids"
_MEND = "export the head again"


def captures(found: Checkpoint, spec: TargetSpec) -> list[str]:
    """`final` and what the head reads."""
    return list(dict.fromkeys(("final", *_checked(found, spec).captures)))


def read(found: Checkpoint, ends: TargetEnds) -> DraftHead:
    _checked(found, ends.spec)
    head = head_from_record(found.config[KEY])
    state = {name: found.weight(name) for name in head.state_dict() if name != _IDS}
    if head.draft_ids is not None:
        state[_IDS] = ids_D = found.stored[_IDS].read()
        if not bool((ids_D[1:] > ids_D[:-1]).all()) or int(ids_D[0]) < 0 or int(ids_D[-1]) >= ends.spec.vocab_size:
            raise found.refuse(f"{_IDS} do not ascend within the target's {ends.spec.vocab_size} ids", _MEND)
    head.load_state_dict(state)
    return head


def _checked(found: Checkpoint, spec: TargetSpec) -> DraftHead:
    """The head the record describes, without memory, its tensors' names and shapes compared with the file's."""
    try:
        with torch.device("meta"):
            head = head_from_record(found.config[KEY])
    except UNTRUSTED as e:
        why = f"{e} is missing or unknown" if isinstance(e, KeyError) else str(e)
        raise found.refuse(f"config.json: {KEY} describes no head ({why})", _MEND) from e
    _check_types(found, head.config)
    _check_values(found, head, spec)
    state = head.state_dict()
    found.check({name: tuple(t.shape) for name, t in state.items() if name != _IDS}, (_IDS,) if _IDS in state else ())
    if _IDS in state:
        found.check_one(_IDS, tuple(state[_IDS].shape), (torch.int64,))
    check_rope(found, head.config.layer)
    return head


def _check_types(found: Checkpoint, config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            _check_types(found, value)
            continue
        wanted: Any = get_origin(field.type) or field.type
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise found.refuse(f"config.json: {KEY}: {field.name}={value!r} is no {wanted.__name__}", _MEND)


def _check_values(found: Checkpoint, head: DraftHead, spec: TargetSpec) -> None:
    """Of this target, and of sizes that fit each other."""
    layer, eagle3 = head.config.layer, isinstance(head.config, Eagle3Config)
    target = found.config.get("target")
    vocab = target.get("vocab_size") if isinstance(target, dict) else None
    if (layer.hidden_size, vocab) != (spec.hidden_size, spec.vocab_size):
        what = f"hidden_size and vocab_size are {layer.hidden_size} and {vocab!r}, the target's {spec.hidden_size} and {spec.vocab_size}"
        raise found.refuse(what, "this head was made for another target")
    if (family := target.get("model_type") if isinstance(target, dict) else None) != spec.model_type:
        raise found.refuse(
            f"model_type of the head's target is {family!r}, this target's {spec.model_type!r}", "it was made for another target"
        )
    fits = layer.num_kv_heads > 0 and layer.num_heads > 0 and layer.num_heads % layer.num_kv_heads == 0
    fits &= layer.head_dim > 0 and layer.head_dim % 2 == 0 and layer.sliding_window >= 0 and 0 < layer.rms_norm_eps < math.inf
    fits &= layer.attention_input in ((2 * spec.hidden_size,) if eagle3 else (0, spec.hidden_size))
    if eagle3:
        fits &= head.config.vocab_size == spec.vocab_size and 0 < head.config.draft_vocab_size <= spec.vocab_size
    if not fits:
        raise found.refuse(f"config.json: the sizes in {KEY} do not fit each other", _MEND)
    possible = [f"after_{i}" for i in range(spec.num_layers)]
    if eagle3 and (not head.captures or [name for name in possible if name in head.captures] != list(head.captures)):
        raise found.refuse(
            f"captures {list(head.captures)!r} are not ascending ones of after_0 to {possible[-1]}", "give the head's own target"
        )
