"""What no Llama draft class of another engine has a place for, whichever EAGLE head it runs."""

from collections.abc import Collection, Iterator

from mtptrain.heads.eagle import EagleConfig
from mtptrain.heads.eagle3 import Eagle3Config
from mtptrain.target.spec import TargetSpec


def llama_limits(config: EagleConfig | Eagle3Config, spec: TargetSpec, rope_types: Collection[str]) -> Iterator[str]:
    """A reason for each thing of head or target that is lost. `rope_types`: those that the engine turns by as transformers does."""
    layer, rope = config.layer, config.layer.rope
    kind = rope.get("rope_type", "default")
    if spec.embed_scale != 1.0:
        yield f"embed_scale={spec.embed_scale:g}: the class applies none"
    if isinstance(config, EagleConfig) or not config.own_lm_head:
        if spec.logit_scale != 1.0:
            yield f"logit_scale={spec.logit_scale:g}: the class applies none"
        if spec.logit_softcap is not None:
            yield f"logit_softcap={spec.logit_softcap:g}: the class applies none"
    if layer.attention_bias:
        yield "attention_bias: the class has no biases on q, k and v alone"
    if layer.qk_norm:
        yield "qk_norm: the class has no q and k norms"
    if layer.sliding_window:
        yield f"sliding_window={layer.sliding_window}: the class attends to everything"
    if kind not in rope_types:
        yield f"rope_type={kind}: the class's frequencies are not the target's"
    if rope.get("attention_factor") is not None:
        yield f"rope attention_factor={rope['attention_factor']:g}: the class computes its own"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor={rope['partial_rotary_factor']:g}: the class rotates whole heads"
    if isinstance(config, Eagle3Config):
        if config.norm_before_residual:
            yield "head.norm_before_residual=true: the class adds the un-normed state"
        if len(config.captures) == 1:
            yield f"head.aux_captures={config.captures[0]}: of one state alone the class takes no fc"
