"""Bytes of a stored state, in closed form. Nothing heavy is imported: plan asks this too."""

_OUTLIER_SHARE = {"bf16": 0, "int8": 16, "fp8": 64, "int4": 16}
"""One channel of this many is kept as it is."""
GROUP = 32
"""Neighbouring channels that share a scale in int4; a hidden size must be a multiple of it there."""
_SCALE_BYTES = 4
_GROUP_SCALE_BYTES = 2


def outlier_channels(codec: str, hidden_size: int) -> int:
    """Channels of a state that are kept in bf16."""
    share = _OUTLIER_SHARE[codec]
    return -(-hidden_size // share) if share else 0


def state_bytes(codec: str, hidden_size: int) -> int:
    """Of one token's state at one capture; what a file says once (its header, which channels are outliers) is not counted."""
    kept = 2 * outlier_channels(codec, hidden_size)
    if codec == "bf16":
        return 2 * hidden_size
    if codec == "int4":
        return hidden_size // GROUP * (GROUP // 2 + _GROUP_SCALE_BYTES) + kept
    return hidden_size + _SCALE_BYTES + kept
