"""User turns without a data set: the project's own prompts, and turns that an instruct target writes itself.

An instruct model has learned the text of its training dialogues, the user's words among it. Given its chat template up
to where the first user turn begins, and sampled, it writes such turns, and what it writes is what it was trained to
answer. Turn number n of a seed is always the same text; the filters look at the turns in that order.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtptrain.config import SelfConfig
from mtptrain.data.responses import Completed, Generate, Request
from mtptrain.data.split import NGRAM, normalised
from mtptrain.errors import UserError

_SENTINEL = "mtptrain-user-turn"
_ATTEMPTS_PER_TURN = 4
_ROUND = 256
_SPARE = 1.25
_REPLY_OPENINGS = (
    "as an ai",
    "i'm sorry, but",
    "i am sorry, but",
    "sure,",
    "sure!",
    "certainly",
    "of course",
    "here is ",
    "here are ",
    "here's ",
)


@dataclass(slots=True)
class Round:
    """New turns, and how many attempts they and all rounds before took; what a later call needs to go on from here."""

    texts: list[str]
    attempts: int


def own_prompts() -> list[dict[str, Any]]:
    """The project's own prompts: {"id", "source": "own/<category>", "messages": one or two user turns}."""
    lines = files("mtptrain.data").joinpath("own_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def user_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the chat template up to where the first user turn's text begins. Raises UserError for a template that hides it."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False)
    before, found, _ = str(rendered).partition(_SENTINEL)
    if not found or not before:
        raise UserError(
            "data.source=self: the target's chat template has nothing before the user's text to start from; use data.source=files"
        )
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


class TurnFilter:
    """Accepts a written turn or names the reason against it; remembers what it accepted."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], min_new_tokens: int, known: set[str]) -> None:
        self._tokenizer, self._min_new_tokens = tokenizer, min_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._special_ids = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
        self._texts = {normalised(text) for text in known}
        self._ngrams = {gram for text in known for gram in _ngrams(text)}
        self.rejected: Counter[str] = Counter()

    def accept(self, turn: Completed) -> str | None:
        """The text to keep, or None."""
        ids = [i for i in turn.tokens if i not in self._stop_ids]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)).strip()
        if reason := self._reason(turn, ids, text):
            self.rejected[reason] += 1
            return None
        self._texts.add(normalised(text))
        self._ngrams |= _ngrams(text)
        return text

    def _reason(self, turn: Completed, ids: list[int], text: str) -> str | None:
        words = normalised(text).split()
        if turn.hit_limit:
            return "without an end"
        if len(ids) < self._min_new_tokens or not words:
            return "too short"
        if not self._special_ids.isdisjoint(ids) or "\ufffd" in text or not all(c.isprintable() or c in "\n\t" for c in text):
            return "not plain text"
        if normalised(text).startswith(_REPLY_OPENINGS):
            return "reads as a reply"
        if len(words) >= NGRAM and len(set(words)) < len(words) / 2:
            return "repeats itself"
        if normalised(text) in self._texts or not self._ngrams.isdisjoint(_ngrams(text)):
            return "known already"
        return None


def write_user_turns(
    generate: Generate,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    cfg: SelfConfig,
    known: set[str],
    done: Sequence[Round] = (),
) -> Iterator[Round]:
    """Yield rounds of new user turns, `cfg.count` in all, none equal to a `known` text or sharing 13 consecutive words with one.

    `generate` samples at the temperature of `cfg`. `done`: the rounds of a call that was cut short; the rest is what that call would
    have yielded. Warns and ends with fewer when four attempts a turn were not enough.
    """
    prefix = user_prefix(tokenizer)
    written_before = [text for earlier in done for text in earlier.texts]
    turns = TurnFilter(tokenizer, stop_ids, cfg.min_new_tokens, known | set(written_before))
    kept, attempts = len(written_before), done[-1].attempts if done else 0
    while kept < cfg.count and attempts < _ATTEMPTS_PER_TURN * cfg.count:
        size = min(_ROUND, ceil((cfg.count - kept) * _SPARE), _ATTEMPTS_PER_TURN * cfg.count - attempts)
        requests = [Request(str(n), prefix) for n in range(attempts, attempts + size)]
        written = sorted((turn for done in generate(requests) for turn in done), key=lambda turn: int(turn.id))
        attempts += size
        texts = [text for turn in written if (text := turns.accept(turn)) is not None][: cfg.count - kept]
        kept += len(texts)
        if texts:
            yield Round(texts, attempts)
    if kept < cfg.count:
        reasons = ", ".join(f"{count} {reason}" for reason, count in turns.rejected.most_common())
        warnings.warn(f"the target wrote {kept} of {cfg.count} user turns in {attempts} attempts ({reasons})", stacklevel=2)


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = normalised(text).split()
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}
