"""Responses by the target: continuous batching on a transformers causal LM.

Choices. A fixed number of slots runs at once; a sequence that ends is replaced at once by a waiting one, whose prompt
is computed in the same forward as the others' next tokens (slots.py). No padding is computed in any linear layer, and
lm_head runs on the rows that need it. A prefix that all prompts share (the template's system turn) is computed once.
Longest prompts go first, so that slots have similar lengths and too little memory shows at the start.

Greedy output is that of one sequence alone, up to how float sums round in batches of different sizes. Sampled output
draws from a stream of random numbers that belongs to (seed, request id), so it does not depend on the company either.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtptrain.data.slots import Segment, Slots, require_supported, slot_attention
from mtptrain.errors import UserError

_PREFILL_TOKENS = 1024
_CPU_CACHE_BYTES = 5 << 29
_FREE_SHARE = 0.5


@dataclass(slots=True)
class Request:
    """A prompt as token ids; `id` also seeds its sampling."""

    id: str
    prompt: list[int]


@dataclass(slots=True)
class Completed:
    """`tokens`: the generated ids, end marker included where one was produced; `hit_limit`: none was."""

    id: str
    tokens: list[int]
    hit_limit: bool


Generate = Callable[[Sequence[Request]], Iterable[list[Completed]]]
"""Sequences as they end, in any order, each once; a list holds those that ended together."""


@dataclass(slots=True)
class _Row:
    """A running sequence. Its last token is not cached yet."""

    request: Request
    limit: int
    rng: random.Random
    tokens: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def final_length(self) -> int:
        return len(self.request.prompt) + self.limit


def sample(logits_BV: Tensor, temperature: float, top_p: float, draws: Sequence[random.Random]) -> list[int]:
    """One id a row from softmax(logits / temperature) restricted to its nucleus; row b uses `draws[b]` only.

    The nucleus holds every id for which the ids more probable than it have mass below `top_p`. It is drawn from without
    sorting: draw from everything; an id outside the nucleus is dropped together with all that are no more probable
    (none of them is inside), and the row is drawn again. What is drawn inside has the nucleus's distribution exactly.
    """
    probs_BV = torch.softmax(logits_BV.float() / temperature, -1)
    allowed_BV = probs_BV.clone()
    chosen_B = torch.empty(len(draws), dtype=torch.long)
    waiting = list(range(len(draws)))
    while waiting:
        index = torch.tensor(waiting, device=probs_BV.device)
        mass_WV = allowed_BV[index].cumsum(-1, dtype=torch.float64)
        drawn_W1 = torch.tensor([[1.0 - draws[b].random()] for b in waiting], dtype=torch.float64, device=probs_BV.device)
        pick_W1 = torch.searchsorted(mass_WV, drawn_W1 * mass_WV[:, -1:])
        p_W1 = probs_BV[index].gather(1, pick_W1)
        above_W = torch.where(probs_BV[index] > p_W1, probs_BV[index], 0.0).sum(-1)
        inside_W = (above_W < top_p).cpu()
        chosen_B[index.cpu()] = pick_W1[:, 0].cpu()
        allowed_BV[index] = torch.where(probs_BV[index] > p_W1, allowed_BV[index], 0.0)
        waiting = [b for b, ok in zip(waiting, inside_W.tolist(), strict=True) if not ok]
    return chosen_B.tolist()


def _common_prefix(prompts: list[list[int]]) -> int:
    """Length of the prefix all prompts share, at most one less than the shortest."""
    first, last = min(prompts), max(prompts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return min(shared, min(map(len, prompts)) - 1)


class HfGenerator:
    """Generates from `model` (eval mode) with at most `batch_size` sequences at once.

    `temperature` 0 is greedy. The key/value cache is bounded: `cache_bytes`, else 2.5 GiB on a CPU and half the free memory
    of a GPU; fewer sequences run at once where the longest would not fit. Raises UserError for a model whose attention is
    not supported and for a prompt that leaves no room in the model's context; a response ends where the context does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Sequence[int],
        *,
        batch_size: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        cache_bytes: int | None = None,
    ) -> None:
        require_supported(model)
        self.model, self.stop_ids = model, frozenset(stop_ids)
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.context = self._context()
        self.cache_tokens = max(1, (cache_bytes or self._default_cache_bytes()) // self._bytes_per_token())

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> Iterator[list[Completed]]:
        """Yield sequences as they end, in any order, each once; a list holds those that ended together."""
        waiting = deque(self._row(r) for r in sorted(requests, key=lambda r: (-len(r.prompt), r.id)))
        rows: list[_Row] = []
        slots = Slots()
        if len(waiting) > 1:
            self._share_prefix(slots, [row.request.prompt for row in waiting])
        while waiting or rows:
            admitted = self._admit(waiting, rows, slots)
            self._step(rows, admitted, slots)
            rows += admitted
            if done := self._retire(rows, slots):
                yield done

    def _row(self, request: Request) -> _Row:
        limit = min(self.max_new_tokens, self.context - len(request.prompt))
        if not request.prompt or limit < 1:
            raise UserError(
                f"prompt {request.id} has {len(request.prompt)} tokens, must have 1 to {self.context - 1} (the target's context)"
            )
        return _Row(request, limit, random.Random(f"{self.seed}/{request.id}"))

    def _share_prefix(self, slots: Slots, prompts: list[list[int]]) -> None:
        length = _common_prefix(prompts)
        if length > 0:
            slots.reserve(1, length)
            self._forward(slots, [], [Segment(0, 0, length, 0)], prompts[0][:length], list(range(length)), [0])
            slots.keep_prefix(length)

    def _admit(self, waiting: deque[_Row], rows: list[_Row], slots: Slots) -> list[_Row]:
        """Take waiting sequences while slots and this forward's token budget allow; always one if none runs."""
        admitted: list[_Row] = []
        if not waiting:
            return admitted
        longest = max(row.final_length for row in [waiting[0], *rows])
        slots.reserve(min(self.batch_size, max(1, self.cache_tokens // longest), len(rows) + len(waiting)), longest)
        tokens = 0
        while waiting and len(rows) + len(admitted) < slots.rows:
            tokens += len(waiting[0].request.prompt) - slots.prefix
            if admitted and tokens > _PREFILL_TOKENS:
                break
            admitted.append(waiting.popleft())
        return admitted

    def _step(self, rows: list[_Row], admitted: list[_Row], slots: Slots) -> None:
        """One forward: every running row's next token and every admitted row's first one."""
        tokens = [row.tokens[-1] for row in rows]
        positions = [row.cached for row in rows]
        keep = list(range(len(rows)))
        segments = []
        for i, row in enumerate(admitted):
            new = row.request.prompt[slots.prefix :]
            segments.append(Segment(len(rows) + i, len(tokens), len(tokens) + len(new), slots.prefix))
            tokens += new
            positions += range(slots.prefix, len(row.request.prompt))
            keep.append(len(tokens) - 1)
        logits_BV = self._forward(slots, [row.cached for row in rows], segments, tokens, positions, keep)
        for row, token in zip([*rows, *admitted], self._choose(logits_BV, [*rows, *admitted]), strict=True):
            row.tokens.append(token)

    def _forward(
        self, slots: Slots, decoding: list[int], segments: list[Segment], tokens: list[int], positions: list[int], keep: list[int]
    ) -> Tensor:
        """Logits [B, V] of the tokens at indices `keep`."""
        device = self.model.device
        slots.begin(decoding, segments, device)
        with slot_attention(self.model):
            out = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(keep, device=device),
                slots=slots,
            )
        return out.logits[0]

    def _choose(self, logits_BV: Tensor, rows: list[_Row]) -> list[int]:
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        return sample(logits_BV, self.temperature, self.top_p, [row.rng for row in rows])

    def _retire(self, rows: list[_Row], slots: Slots) -> list[Completed]:
        """Remove ended rows; the last slot moves into a gap, so that running slots stay the first ones."""
        done = []
        for slot in reversed(range(len(rows))):
            row = rows[slot]
            stopped = row.tokens[-1] in self.stop_ids
            if stopped or len(row.tokens) == row.limit:
                done.append(Completed(row.request.id, row.tokens, hit_limit=not stopped))
                last = rows.pop()
                if last is not row:
                    rows[slot] = last
                    slots.move(len(rows), slot, last.cached)
        return done

    def _context(self) -> int:
        """Positions a sequence may have: longrope ends at its original length, because beyond it a sequence would change the others'
        frequencies (all tokens of a forward share them)."""
        config = self.model.config.get_text_config(decoder=True)
        rope = config.rope_parameters
        entries = rope.values() if all(isinstance(entry, dict) for entry in rope.values()) else [rope]
        originals = [entry["original_max_position_embeddings"] for entry in entries if entry["rope_type"] == "longrope"]
        return min([config.max_position_embeddings, *originals])

    def _bytes_per_token(self) -> int:
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * size * self.model.dtype.itemsize

    def _default_cache_bytes(self) -> int:
        if self.model.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.model.device)[0] * _FREE_SHARE)
        return min(_CPU_CACHE_BYTES, int(psutil.virtual_memory().available * _FREE_SHARE))
