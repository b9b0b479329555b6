"""EAGLE-3 and 3.1 heads: SafeAILab's names, which SpecForge, SGLang, TensorRT-LLM and vLLM share, and the speculators library's config.

Which layers a head reads is said with two bases. The rule, in this order:

1. `eagle_aux_hidden_state_layer_ids` at the top of config.json are layers that the streams *enter* (vLLM, speculators).
2. The same key in `eagle_config` is read by SGLang as layers that the streams come *after*; vLLM does not look there and takes its
   default. Alone it is taken only where both readers get the same streams; else it is refused, and a top-level key settles it.
3. Without either, every engine's default: the streams entering layers 2, N//2 and N-3.

d2t holds offsets (id of row i = i + d2t[i]), int64, or int32 in TensorRT-LLM's. Our draft ids ascend: lm_head is sorted with them.
norm_before_residual is false where it is not written, but true in a speculators config, as vLLM reads it.

Sources: SafeAILab/EAGLE eagle/model/cnets.py; sgl-project/SpecForge specforge/modeling/draft/llama3_eagle.py; sgl-project/sglang
python/sglang/srt/models/llama_eagle3.py; vllm-project/vllm model_executor/models/llama_eagle3.py and
transformers_utils/configs/speculators/algos.py; vllm-project/speculators src/speculators/models/eagle3; NVIDIA/TensorRT-LLM
_torch/models/modeling_speculative.py. Legend: H hidden, V vocabulary of the target, D of the draft.
"""

from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.eagle_names import D2T, eagle3_parameters
from mtptrain.exporters.public_checkpoint import Checkpoint, check_rope, layer_shapes, llama_layer
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.target.ends import TargetEnds
from mtptrain.target.spec import TargetSpec

T2D = "t2d"
IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER_IDS = ("target_hidden_layer_ids", "target_layer_ids", "layer_ids")
"""Keys that name layers for some trainers, with a base that no engine here reads."""
_MEND = f"write the layers that its streams enter as {IDS} at the top of config.json"


def read(found: Checkpoint, ends: TargetEnds) -> Eagle3Head:
    """The head. A copy of the target's embeddings must be the target's."""
    config = shape(found, ends.spec)
    found.check_copy("embed_tokens.weight", ends.embed_VH, "the target's embeddings")
    if not config.own_lm_head and not ends.spec.tie_word_embeddings and found.config.get("tie_word_embeddings") is True:
        raise found.refuse(
            "it drafts with the embeddings (tie_word_embeddings), which are not the target's lm_head", "it can't be imported"
        )
    tensors = {name: found.weight(name) for name in _expected(config)}
    ids_D, order_D = _draft_ids(found, config)
    if config.own_lm_head:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order_D]
    tensors[D2T] = ids_D - torch.arange(len(ids_D))
    head = Eagle3Head(config)
    head.load_state_dict(eagle3_parameters(tensors, head))
    return head


def shape(found: Checkpoint, spec: TargetSpec) -> Eagle3Config:
    """The head's config, with names and shapes of all tensors checked; no weight is read."""
    values, nested = _group(found, "transformer_layer_config") if found.speculators else found.config, _group(found, "eagle_config")
    layer = llama_layer(found, values, spec, 2 * spec.hidden_size)
    target_size = found.config.get("target_hidden_size")
    if target_size not in (None, spec.hidden_size):
        raise found.refuse(
            f"target_hidden_size is {target_size!r}, the target's {spec.hidden_size}", "this head was made for another target"
        )
    if not found.flag(True, {"eagle_config.use_aux_hidden_state": nested.get("use_aux_hidden_state")}):
        raise found.refuse(
            "config.json: use_aux_hidden_state=false, EAGLE-3 heads read streams between layers", "this head can't be imported"
        )
    size = found.config.get("draft_vocab_size")
    if size is not None and not (type(size) is int and 0 < size <= spec.vocab_size):
        raise found.refuse(f"config.json: draft_vocab_size={size!r} is not within the target's {spec.vocab_size} ids", "mend it")
    config = Eagle3Config(
        layer=layer,
        captures=_captures(found, nested, spec),
        vocab_size=spec.vocab_size,
        draft_vocab_size=size or spec.vocab_size,
        own_lm_head="lm_head.weight" in found.stored,
        **_switches(found, nested),
    )
    found.check(_expected(config), (D2T, T2D, "embed_tokens.weight"))
    if D2T in found.stored or config.draft_vocab_size < config.vocab_size:
        found.check_one(D2T, (config.draft_vocab_size,), (torch.int64, torch.int32))
    check_rope(found, layer)
    return config


def _switches(found: Checkpoint, nested: dict[str, Any]) -> dict[str, bool]:
    """Options of the head by our names; some write them in eagle_config, where TensorRT-LLM has another name for norm_output."""
    defaults = {"norm_before_residual": found.speculators, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    said = {name: {name: found.config.get(name), f"eagle_config.{name}": nested.get(name)} for name in defaults}
    said["norm_output"]["eagle_config.return_hidden_post_norm"] = nested.get("return_hidden_post_norm")
    return {name: found.flag(default, said[name]) for name, default in defaults.items()}


def _expected(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Weights by SafeAILab's names; norms before fc as vLLM and TensorRT-LLM name them."""
    size, count = config.layer.hidden_size, len(config.captures)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm", *(f"fc_norm.{i}" for i in range(count if config.fc_norm else 0)))
    shapes = {"fc.weight": (size, count * size), **layer_shapes(config.layer, "midlayer."), **{f"{name}.weight": (size,) for name in norms}}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (count * size,)
    if config.own_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    return shapes


def _group(found: Checkpoint, key: str) -> dict[str, Any]:
    group = found.config.get(key)
    if group is None and key == "eagle_config":
        return {}
    if not isinstance(group, dict):
        raise found.refuse(f"config.json: {key} is not an object", "fetch the checkpoint again")
    return group


def _captures(found: Checkpoint, nested: dict[str, Any], spec: TargetSpec) -> list[str]:
    """See the module's docstring. As many as fc reads."""
    last = spec.num_layers
    usual = [2, last // 2, last - 3]
    top, inner = _ids(found, found.config, IDS), _ids(found, nested, f"eagle_config.{IDS}")
    other = next((key for group in (found.config, nested) for key in _OTHER_IDS if group.get(key)), None)
    if other and not top:
        raise found.refuse(f"config.json names its layers by {other}, whose base is not known", _MEND)
    if top:
        entering = top
    elif inner and [i + 1 for i in inner] != usual:
        both = f"eagle_config.{IDS}={inner} is after these layers for SGLang (entering {[i + 1 for i in inner]}), entering them for others"
        raise found.refuse(both, _MEND)
    else:
        entering = usual
        if not 2 < last // 2 < last - 3:
            raise found.refuse(f"config.json names no layers, and the usual three need a target of 7 layers, not {last}", _MEND)
    if entering != sorted(set(entering)):
        raise found.refuse(f"config.json: {IDS}={entering} must ascend: engines sort them", "mend it")
    if entering[0] < 1 or entering[-1] > last:
        raise found.refuse(
            f"config.json: {IDS}={entering}: mtptrain captures the streams entering layers 1 to {last}", "this needs another target"
        )
    return [f"after_{i - 1}" for i in entering]


def _ids(found: Checkpoint, group: dict[str, Any], where: str) -> list[int]:
    ids = group.get(IDS) or []
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise found.refuse(f"config.json: {where}={ids!r} are not layer ids", "mend it")
    return ids


def _draft_ids(found: Checkpoint, config: Eagle3Config) -> tuple[Tensor, Tensor]:
    """Ids of the draft vocabulary, ascending int64 [D], and where their rows are in the file [D]. t2d must tell the same ids."""
    count, vocab = config.draft_vocab_size, config.vocab_size
    offset_D = found.stored[D2T].read().to(torch.int64) if D2T in found.stored else torch.zeros(count, dtype=torch.int64)
    ids_D, order_D = (torch.arange(count) + offset_D).sort()
    if int(ids_D[0]) < 0 or int(ids_D[-1]) >= vocab:
        bad = int(ids_D[0]) if int(ids_D[0]) < 0 else int(ids_D[-1])
        raise found.refuse(f"d2t maps to id {bad}, outside the target's {vocab}", "d2t must hold offsets; fetch the checkpoint again")
    if bool((ids_D[1:] == ids_D[:-1]).any()):
        twice = int(ids_D[1:][ids_D[1:] == ids_D[:-1]][0])
        raise found.refuse(f"d2t maps twice to id {twice}", "d2t must hold offsets; fetch the checkpoint again")
    if T2D in found.stored:
        found.check_one(T2D, (vocab,), (torch.bool,))
        chosen_V = torch.zeros(vocab, dtype=torch.bool)
        chosen_V[ids_D] = True
        if not torch.equal(chosen_V, found.stored[T2D].read()):
            raise found.refuse("t2d and d2t name different ids", "fetch the checkpoint again")
    return ids_D, order_D
