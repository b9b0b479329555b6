"""Reference speculative decoding: real target and real head in plain torch with KV caches, greedy or sampled chain of K drafts.

The draft side follows what engines do: after each verification the draft's step-0 rows of the accepted tokens are written from the
target's true states, then the last row drafts K tokens from its own recycled state. Drafts are verified by rejection sampling
(rejection.py), so the output has the target's own distribution; temperature 0 is its limit, point masses, where a draft is accepted
while it equals the target's argmax.

Legend: T tokens of one forward, H hidden, V vocabulary.
"""

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mtptrain.decoding.rejection import draw, point_mass, verify
from mtptrain.decoding.walk import Draft
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, rows_of
from mtptrain.target.model import hooked, layer_modules


class TargetSession:
    """The target on one sequence: `feed` tokens, get its states; `rewind` drops rejected ones from the KV cache."""

    def __init__(self, model: PreTrainedModel, captures: Sequence[str] = ("final",)) -> None:
        self._captures = captures
        self._layers = layer_modules(model, captures)
        self._decoder = model.get_decoder()
        self._device = model.device
        self._cache = DynamicCache()
        named = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"  # the older name is deprecated since 5.24
        self.length = 0

    def feed(self, tokens: list[int]) -> dict[str, Tensor]:
        """States [T, H] at each capture, `final` among them."""
        ids_1T = torch.tensor([tokens], device=self._device)
        position_1T = torch.arange(self.length, self.length + len(tokens), device=self._device)[None]
        with hooked(self._layers) as states:
            out = self._decoder(input_ids=ids_1T, position_ids=position_1T, use_cache=True, **{self._cache_argument: self._cache})
        self.length += len(tokens)
        return {"final": out.last_hidden_state[0]} | {name: state[0] for name, state in states.items()}

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
    """The target's best logits at each generated token; at temperature 0 the token is their choice."""
    drafts: list[Draft]
    draft_top: list[list[Top]]
    """The draft's best logits at each drafted token; the token is their choice unless the draft is sampled."""


MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""Bits of it."""


def top_logits(lm_head: LmHead, state_TH: Tensor, dtype: torch.dtype) -> list[Top]:
    """The best logits of each row, rounded to `dtype` as an engine of that dtype has them; ids are the target's."""
    rounded = lm_head.logits(state_TH).to(dtype).float()
    ids_V = None if lm_head.ids_V is None else lm_head.ids_V.tolist()
    return [Top(top.ids if ids_V is None else [ids_V[i] for i in top.ids], top.values, MANTISSA[dtype]) for top in _top(rounded)]


class DraftSampling(Enum):
    """How a draft chooses its tokens."""

    greedy = "the draft's argmax"
    sampled = "drawn at the target's temperature"


@dataclass(slots=True)
class Sampling:
    """Target and draft distributions are softmax(logits / temperature); temperature 0 is greedy and leaves chance no room."""

    temperature: float = 0.0
    draft: DraftSampling = DraftSampling.greedy
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    """Every number that the output depends on."""

    @property
    def draft_temperature(self) -> float:
        return self.temperature if self.draft is DraftSampling.sampled else 0.0


@dataclass(slots=True)
class _Drafted:
    token_1K: Tensor
    q_KV: Tensor
    """The distributions the tokens were drawn from."""
    top: list[Top]


def _top(logits_TV: Tensor) -> list[Top]:
    best = logits_TV.topk(min(_TOP, logits_TV.shape[-1]), dim=-1)
    return [Top(ids, values) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def _probabilities(logits_TV: Tensor, top: list[Top], temperature: float) -> Tensor:
    """float64 [T, V]: softmax(logits / temperature), at temperature 0 a point mass on the choice of `top`."""
    if temperature == 0:
        return point_mass(torch.tensor([t.choice for t in top], device=logits_TV.device), logits_TV.shape[-1])
    return torch.softmax(logits_TV.double() / temperature, -1)


@torch.no_grad()
def greedy(model: PreTrainedModel, lm_head: LmHead, prompt: list[int], max_tokens: int, stop_ids: set[int]) -> Generation:
    """The target's own greedy output, one token a forward."""
    session = TargetSession(model)
    out = Generation([], [], [], [])
    feed = prompt
    while len(out.tokens) < max_tokens:
        (top,) = _top(lm_head.logits(session.feed(feed)["final"][-1:]))
        out.tokens.append(top.choice)
        out.top.append(top)
        if top.choice in stop_ids:
            break
        feed = [top.choice]
    return out


@torch.no_grad()
def speculate(
    model: PreTrainedModel,
    drafter: Drafter,
    lm_head: LmHead,
    prompt: list[int],
    max_tokens: int,
    stop_ids: set[int],
    k: int,
    sampling: Sampling | None = None,
) -> Generation:
    """Speculative decoding with draft length `k`, greedy unless `sampling` says otherwise. `lm_head`: the target's.

    The output is the target's own greedy output, or has the distribution of the target's own samples.
    """
    sampling = sampling or Sampling()
    session = TargetSession(model, drafter.head.captures)
    unroll = Unroll(drafter)
    tokens, states = list(prompt), session.feed(prompt)
    logits_TV = lm_head.logits(states["final"][-1:])
    top = _top(logits_TV)
    emitted = draw(_probabilities(logits_TV, top, sampling.temperature), sampling.rng).tolist()
    out = Generation([], [], [], [])
    device = logits_TV.device
    first_row = 0
    while True:
        tokens += emitted
        out.tokens += emitted
        out.top += top[: len(emitted)]
        if len(out.tokens) >= max_tokens or out.tokens[-1] in stop_ids:
            return out
        row_S = torch.arange(first_row, first_row + len(states["final"]), device=device)
        stored = {
            name: s.to(torch.bfloat16).to(s.dtype) for name, s in states.items()
        }  # what the store, and a bf16 engine, hand to the head
        unroll.extend(torch.tensor(tokens, device=device)[row_S + 1], stored, row_S, torch.zeros_like(row_S))
        draft = _draft(unroll, drafter, len(row_S) - 1, k, sampling, device)
        drafted = draft.token_1K[0].tolist()
        fed = session.feed([tokens[-1], *drafted])
        logits_TV = lm_head.logits(fed["final"])
        top = _top(logits_TV)
        verdict = verify(draft.token_1K, draft.q_KV[None], _probabilities(logits_TV, top, sampling.temperature)[None], sampling.rng)
        accepted = int(verdict.accepted_B)
        out.drafts.append(Draft(len(tokens) - 2, drafted, accepted))
        out.draft_top.append(draft.top)
        first_row = len(tokens) - 1  # the row of the token that was fed first
        emitted = _cut([*drafted[:accepted], int(verdict.token_B)], stop_ids, max_tokens - len(out.tokens))
        states = rows_of(fed, slice(0, len(emitted)))
        session.rewind(len(tokens) + len(emitted) - 1)


def _draft(unroll: Unroll, drafter: Drafter, row: int, k: int, sampling: Sampling, device: torch.device) -> _Drafted:
    """Draft `k` tokens from one row of the latest `extend`."""
    only = torch.zeros(1, dtype=torch.int64, device=device)
    state_1H = unroll.start(only + row)
    tokens: list[Tensor] = []
    distributions: list[Tensor] = []
    tops: list[Top] = []
    for step in range(k):
        if step:
            state_1H = unroll.advance(only, tokens[-1])
        logits_1V = drafter.whole_logits(state_1H)
        tops += _top(logits_1V)
        distributions.append(_probabilities(logits_1V, tops[-1:], sampling.draft_temperature))
        tokens.append(draw(distributions[-1], sampling.rng))
    return _Drafted(torch.stack(tokens, 1), torch.cat(distributions), tops)


def _cut(tokens: list[int], stop_ids: set[int], room: int) -> list[int]:
    """Up to the first stop id (kept) and at most `room`."""
    for i, token in enumerate(tokens[:room]):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens[:room]
