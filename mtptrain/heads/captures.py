"""Which of the target's states a head reads, and its key/value heads. Nothing heavy is imported: plan asks this too."""

from mtptrain.config import HeadConfig, HeadKind
from mtptrain.errors import UserError
from mtptrain.target.spec import TargetSpec

_FEWEST_LAYERS = 7
"""Below it the usual three streams are not three."""


def default_captures(num_layers: int) -> list[str]:
    """The streams entering layers 2, N//2 and N-3, as every engine's default; of a target of under 7 layers, those after its last three."""
    if num_layers < _FEWEST_LAYERS:
        return [f"after_{i}" for i in range(max(num_layers - 3, 0), num_layers)]
    return ["after_1", f"after_{num_layers // 2 - 1}", f"after_{num_layers - 4}"]


def eagle3_captures(head: HeadConfig, spec: TargetSpec) -> list[str]:
    """UserError for a layer the target lacks."""
    captures = head.aux_captures or default_captures(spec.num_layers)
    if int(captures[-1].removeprefix("after_")) >= spec.num_layers:
        raise UserError(f"head.aux_captures={captures[-1]}: the target's last layer is after_{spec.num_layers - 1}")
    return list(captures)


def eagle3_kv_heads(head: HeadConfig, spec: TargetSpec) -> int:
    """UserError where the target's query heads cannot share them evenly."""
    if head.num_kv_heads is None:
        return spec.num_kv_heads
    count = head.num_kv_heads or spec.num_heads
    if spec.num_heads % count:
        raise UserError(f"head.num_kv_heads={count}: the target's {spec.num_heads} query heads cannot share them evenly")
    return count


def captures_of(head: HeadConfig, spec: TargetSpec) -> list[str]:
    """States that training the head needs: its own, and `final` for the teacher."""
    return ["final", *eagle3_captures(head, spec)] if head.kind is HeadKind.eagle3 else ["final"]
