"""The reference head on an engine's own tokens: does each draft of the engine's trace come out again?

The target's states are computed afresh from the committed tokens; every draft starts from the row the engine started it from and is
compared token by token up to its first difference, whether it was accepted or not.

Legend: T tokens, H hidden, R rows that drafted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.decoding.compare import Agreement
from mtptrain.decoding.reference import top_logits
from mtptrain.engines.vllm import Step
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.unroll import Unroll, rows_of


@dataclass(slots=True)
class Difference:
    """Where a draft first differs without being a tie."""

    depth: int
    margin: float | None
    """The reference's best logit less its logit of the engine's token; None for a token the draft vocabulary lacks. One that is within
    the rounding of a whole forward (float32: 1e-4) is chance, a larger one a fault."""


@torch.no_grad()
def replay_drafts(
    drafter: Drafter, token_T: Tensor, states: Mapping[str, Tensor], steps: Sequence[Step]
) -> tuple[Agreement, list[Difference | None]]:
    """Agreement of all drafted tokens, and for each step where its draft differs without being a tie (None: nowhere).

    `states`, the target's [T, H] a capture, in the engine's dtype: logits are rounded to it, and a tie is a margin of at most two units
    in its last place.
    """
    agreement = Agreement()
    firsts: list[Difference | None] = [None] * len(steps)
    drafting = sorted((i for i, step in enumerate(steps) if step.drafted), key=lambda i: steps[i].row)
    if not drafting:
        return agreement, firsts
    row_S = torch.arange(len(token_T) - 1, device=token_T.device)
    dtype = next(iter(states.values())).dtype
    unroll = Unroll(drafter)
    unroll.extend(token_T[1:], rows_of(states, slice(0, -1)), row_S, torch.zeros_like(row_S))
    state_RH = unroll.start(torch.tensor([steps[i].row for i in drafting], device=token_T.device))
    depth = 0
    while drafting:
        going = []
        for number, (i, top) in enumerate(zip(drafting, top_logits(drafter.lm_head, state_RH, dtype), strict=True)):
            token = steps[i].drafted[depth]
            agreement.compared += 1
            if top.choice == token:
                agreement.equal += 1
                if len(steps[i].drafted) > depth + 1:
                    going.append(number)
            elif top.ties_with(token):
                agreement.ties += 1
            else:
                firsts[i] = Difference(depth, _margin(drafter, state_RH[number], token))
        keep_A = torch.tensor(going, dtype=torch.int64, device=token_T.device)
        drafting = [drafting[number] for number in going]
        if drafting:
            token_A = torch.tensor([steps[i].drafted[depth] for i in drafting], device=token_T.device)
            state_RH = unroll.advance(keep_A, token_A)
        depth += 1
    return agreement, firsts


def _margin(drafter: Drafter, state_H: Tensor, token: int) -> float | None:
    logits_V = drafter.whole_logits(state_H[None])[0]
    margin = float(logits_V.max() - logits_V[token])
    return margin if math.isfinite(margin) else None
