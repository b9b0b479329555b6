"""What every draft head is: something that fuses a token with a state, one decoder layer, and an output that is recycled.

    feature   the target's captured states -> hidden state of step 0                (later steps have the recycled state instead)
    enter     embedding, hidden state -> residual stream before the layer, and what q, k and v read
    leave     residual stream after the layer -> state that goes to lm_head, and the recycled state

Attention in between, its keys and positions are the unroll's business. Legend: R rows, H hidden, Z what q, k, v read,
D draft vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.heads.layers import DecoderLayer


class DraftHead(nn.Module):
    """A head without what it borrows of the target (drafter.py adds that)."""

    config: Any
    """A dataclass; with it and the tensors of `state_dict` the head can be built again (build.py)."""
    layer: DecoderLayer
    captures: tuple[str, ...] = ("final",)
    """Target states `feature` reads."""
    lm_head: nn.Linear | None
    """The head's own output projection; None: the target's."""
    draft_ids: Tensor | None
    """int64 [D]: token ids of the rows of the output projection, ascending; None: all of the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = None
        self.register_buffer("draft_ids", None)

    def feature(self, states: Mapping[str, Tensor]) -> Tensor:
        """[R, H] from the target's states, one [R, H] a capture."""
        return states["final"]

    @property
    def fusion(self) -> nn.Linear | None:
        """The projection that fuses embedding and state; None where a head has none that reads both."""
        return None

    def fused(self, embed_RH: Tensor, hidden_RH: Tensor) -> Tensor:
        """What `fusion` reads, [R, F]."""
        raise NotImplementedError

    def enter(self, embed_RH: Tensor, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def leave(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def init_random(head: DraftHead, std: float, seed: int) -> None:
    """Matrices ~ N(0, std), drawn in the order of their names; norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(head.named_parameters()):
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            elif name.endswith("bias"):
                parameter.zero_()
