"""Reference speculative decoding: real target and real head in plain torch with KV caches, greedy chain of K drafts.

The draft side follows what engines do: after each verification the draft's step-0 rows of the accepted tokens are written from the
target's true states, then the last row drafts K tokens from its own recycled state.

Legend: T tokens of one forward, H hidden.
"""

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mtptrain.decoding.walk import Draft
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.unroll import Unroll
from mtptrain.losses import LmHead


class TargetSession:
    """The target on one sequence: `feed` tokens, get final states; `rewind` drops rejected ones from the KV cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder = model.get_decoder()
        self._device = model.device
        self._cache = DynamicCache()
        named = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"  # the older name is deprecated since 5.24
        self.length = 0

    def feed(self, tokens: list[int]) -> Tensor:
        """States [T, H] after the final norm."""
        ids_1T = torch.tensor([tokens], device=self._device)
        position_1T = torch.arange(self.length, self.length + len(tokens), device=self._device)[None]
        out = self._decoder(input_ids=ids_1T, position_ids=position_1T, use_cache=True, **{self._cache_argument: self._cache})
        self.length += len(tokens)
        return out.last_hidden_state[0]

    def rewind(self, length: int) -> None:
        if length < self.length:
            self._cache.crop(length - self.length)  # negative: tokens to remove
            self.length = length


_TOP = 4


@dataclass(slots=True)
class Top:
    """The best few logits of one position, best first; they decide whether another choice was a tie."""

    ids: list[int]
    values: list[float]
    bits: int = 7
    """Of the mantissa of the dtype whose last place decides about ties; bfloat16 unless said otherwise."""

    @property
    def choice(self) -> int:
        return self.ids[0]

    def ties_with(self, token: int) -> bool:
        """Whether `token` lies within two units in the last place of the best."""
        if token not in self.ids:
            return False
        best = self.values[0]
        unit = 2.0 ** (math.floor(math.log2(abs(best))) - self.bits) if best else 0.0
        return best - self.values[self.ids.index(token)] <= 2 * unit


@dataclass(slots=True)
class Generation:
    """Tokens generated after the prompt, and the drafts that led to them (Draft.tokens holds all K drafted tokens)."""

    tokens: list[int]
    top: list[Top]
    """The target's best logits at each generated token."""
    drafts: list[Draft]
    draft_top: list[list[Top]]
    """The draft's best logits at each drafted token."""


_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def top_logits(lm_head: LmHead, state_TH: Tensor, dtype: torch.dtype) -> list[Top]:
    """The best logits of each row, rounded to `dtype` as an engine of that dtype has them."""
    best = lm_head.logits(state_TH).to(dtype).float().topk(_TOP, dim=-1)
    return [Top(ids, values, _MANTISSA[dtype]) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def _top(lm_head: LmHead, state_TH: Tensor) -> list[Top]:
    best = lm_head.logits(state_TH).topk(_TOP, dim=-1)
    return [Top(ids, values) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


@torch.no_grad()
def greedy(model: PreTrainedModel, lm_head: LmHead, prompt: list[int], max_tokens: int, stop_ids: set[int]) -> Generation:
    """The target's own greedy output, one token a forward."""
    session = TargetSession(model)
    out = Generation([], [], [], [])
    feed = prompt
    while len(out.tokens) < max_tokens:
        (top,) = _top(lm_head, session.feed(feed)[-1:])
        out.tokens.append(top.choice)
        out.top.append(top)
        if top.choice in stop_ids:
            break
        feed = [top.choice]
    return out


@torch.no_grad()
def speculate(
    model: PreTrainedModel,
    head: MtpHead,
    embed_VH: Tensor,
    embed_scale: float,
    lm_head: LmHead,
    prompt: list[int],
    max_tokens: int,
    stop_ids: set[int],
    k: int,
) -> Generation:
    """Greedy speculative decoding with draft length `k`; the output is the target's own greedy output."""
    session = TargetSession(model)
    unroll = Unroll(head, embed_VH, embed_scale)
    tokens, final_TH = list(prompt), session.feed(prompt)
    emitted = _top(lm_head, final_TH[-1:])
    out = Generation([], [], [], [])
    device = final_TH.device
    first_row = 0
    while True:
        tokens += [top.choice for top in emitted]
        out.tokens += [top.choice for top in emitted]
        out.top += emitted
        if len(out.tokens) >= max_tokens or out.tokens[-1] in stop_ids:
            return out
        row_S = torch.arange(first_row, first_row + len(final_TH), device=device)
        stored_TH = final_TH.to(torch.bfloat16).to(final_TH.dtype)  # what the store, and a bf16 engine, hand to the head
        unroll.extend(torch.tensor(tokens, device=device)[row_S + 1], stored_TH, row_S, torch.zeros_like(row_S))
        draft_top = _draft(unroll, lm_head, len(final_TH) - 1, k, device)
        drafted = [top.choice for top in draft_top]
        states_TH = session.feed([tokens[-1], *drafted])
        verified = _top(lm_head, states_TH)
        accepted = next((i for i in range(k) if drafted[i] != verified[i].choice), k)
        out.drafts.append(Draft(len(tokens) - 2, drafted, accepted))
        out.draft_top.append(draft_top)
        first_row = len(tokens) - 1  # the row of the token that was fed first
        emitted = _cut(verified[: accepted + 1], stop_ids, max_tokens - len(out.tokens))
        final_TH = states_TH[: len(emitted)]
        session.rewind(len(tokens) + len(emitted) - 1)


def _draft(unroll: Unroll, lm_head: LmHead, row: int, k: int, device: torch.device) -> list[Top]:
    """Draft `k` tokens from one row of the latest `extend`."""
    only = torch.zeros(1, dtype=torch.int64, device=device)
    state_1H = unroll.start(only + row)
    drafted: list[Top] = []
    for _ in range(k):
        drafted += _top(lm_head, state_1H)
        if len(drafted) < k:
            state_1H = unroll.advance(only, only + drafted[-1].choice)
    return drafted


def _cut(verified: list[Top], stop_ids: set[int], room: int) -> list[Top]:
    """Up to the first stop id (kept) and at most `room`."""
    for i, top in enumerate(verified[:room]):
        if top.choice in stop_ids:
            return verified[: i + 1]
    return verified[:room]
