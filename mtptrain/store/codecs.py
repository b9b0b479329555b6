"""How hidden states are stored. A codec owns the tensors of a capture's file; `data` [N, H] is always one of them.

N tokens of a shard, T of a document, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec:
    """Name and version are written beside every capture; a change of the stored bytes needs a new version."""

    name: str
    version: int
    encode: Callable[[Tensor], dict[str, Tensor]]
    """bf16 states [N, H] of a shard -> tensors of its file."""
    decode: Callable[[dict[str, Tensor], int, int], Tensor]
    """(memory-mapped tensors, start, stop) -> bf16 states [T, H] of rows start..stop."""

    @property
    def tag(self) -> dict[str, str | int]:
        return {"name": self.name, "version": self.version}


BF16 = StateCodec(
    name="bf16",
    version=1,
    encode=lambda state_NH: {"data": state_NH.to(torch.bfloat16).contiguous()},
    decode=lambda tensors, start, stop: tensors["data"][start:stop],
)
CODECS = {codec.name: codec for codec in (BF16,)}
