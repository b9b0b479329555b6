"""From a record to a document: turns answered by the target one after the other, or kept as they are in the data.

Ids that the target generated stay as they are. A prompt is the document so far and what the template puts before the next
answer, so document and prompt are one growing list of ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtptrain.data.documents import Document
from mtptrain.data.readers import BadRow, Record
from mtptrain.data.template import ChatTemplate, Inexact, Message

NOT_EXACT = "chat template not exact"
OVER_LENGTH = "over length"


def plan_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """What precedes each answer of the target: assistant messages of the data are left out, each user turn gets an answer.

    [system, user, user, assistant, user] -> [[system, user], [user], [user]]. Raises BadRow.
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in messages:
        asked = any(m["role"] != "system" for m in pending)
        if message["role"] == "assistant":
            if message.get("tool_calls"):
                raise BadRow("tool calls need data.responses.mode=keep")
            if not asked and not turns:
                raise BadRow("assistant turn before any user turn")
        if asked and message["role"] != "tool":
            turns.append(pending)
            pending = []
        if message["role"] != "assistant":
            pending.append(message)
    if any(m["role"] != "system" for m in pending):
        turns.append(pending)
    elif pending:
        raise BadRow("no user turn" if not turns else "system message at the end")
    return turns


@dataclass(slots=True, kw_only=True)
class Dialogue:
    """A record whose assistant turns are being written by the target."""

    record: Record
    split: str
    turns: list[list[Message]]
    served: str
    """Text of the next answer's prompt, as an engine renders it."""
    tokens: list[int]
    """The prompt of the next answer: everything so far, generated ids untouched."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ended: str = ""
    """Why no further turn is answered; empty while one is waiting."""

    @property
    def unanswered(self) -> int:
        return len(self.turns) - len(self.spans)

    def accept(self, answer: list[int], template: ChatTemplate, most_prompt: int) -> None:
        """Append the target's answer, and the next turn's prompt if one can follow. most_prompt: tokens a prompt may have."""
        start = len(self.tokens)
        self.tokens = self.tokens + answer
        self.spans.append((start, len(self.tokens)))
        if not self.unanswered:
            self.ended = "all turns are answered"
        elif answer[-1] not in template.stop_ids:
            self.ended = "an answer was cut at data.responses.max_new_tokens"
        else:
            self._go_on(answer, template, most_prompt)

    def _go_on(self, answer: list[int], template: ChatTemplate, most_prompt: int) -> None:
        said = {"role": "assistant", "content": template.decode(answer[:-1])}
        messages = [*self.messages, said, *self.turns[len(self.spans)]]
        try:
            served, between = template.continuation(self.served, answer, messages, self.record.tools)
        except Inexact as e:
            self.ended = str(e)
            return
        if len(self.tokens) + len(between) > most_prompt:
            self.ended = "the next prompt is over length"
            return
        self.served, self.messages, self.tokens = served, messages, self.tokens + between

    def document(self, min_supervised: int) -> Document:
        """The finished document. Raises BadRow if there is too little to learn from."""
        _require_supervised(self.spans, min_supervised)
        return Document(id=self.record.id, source=self.record.source, split=self.split, tokens=self.tokens, spans=self.spans)


def open_dialogue(record: Record, split: str, template: ChatTemplate, most_prompt: int) -> Dialogue:
    """The dialogue up to its first answer. Raises BadRow."""
    turns = plan_turns(record.messages)
    try:
        served = template.render(turns[0], record.tools, prompt=True)
    except Inexact as e:
        raise BadRow(NOT_EXACT, str(e)) from e
    tokens = template.ids(served)
    if len(tokens) > most_prompt:
        raise BadRow(OVER_LENGTH, f"the prompt has {len(tokens)} tokens, data.max_length - data.responses.max_new_tokens is {most_prompt}")
    return Dialogue(record=record, split=split, turns=turns, served=served, tokens=tokens, messages=list(turns[0]))


def kept_document(record: Record, split: str, template: ChatTemplate, max_length: int, min_supervised: int) -> tuple[Document, bool]:
    """(document, whether it was cut) with the assistant turns of the data; it ends with its last answer. Raises BadRow."""
    _require_answers(record.messages)
    try:
        tokens, spans = template.kept(record.messages, record.tools)
    except Inexact as e:
        raise BadRow(NOT_EXACT, str(e)) from e
    _require_supervised(spans, min_supervised)
    tokens = tokens[: spans[-1][1]]
    cut = len(tokens) > max_length
    if cut:
        left = [(start, min(end, max_length)) for start, end in spans if start < max_length]
        if sum(end - start for start, end in left) < min_supervised:
            raise BadRow(OVER_LENGTH, f"{len(tokens)} tokens; cut at data.max_length={max_length} too little supervision is left")
        tokens, spans = tokens[:max_length], left
    return Document(id=record.id, source=record.source, split=split, tokens=tokens, spans=spans), cut


def _require_answers(messages: Sequence[dict[str, Any]]) -> None:
    if messages[-1]["role"] != "assistant":
        raise BadRow("no supervised token", "the last message is not an assistant turn")
    asked = False
    for n, message in enumerate(messages):
        asked = asked or message["role"] == "user"
        if message["role"] == "assistant" and not asked:
            raise BadRow("assistant turn before any user turn")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise BadRow("empty", f"message {n} is an empty assistant turn")


def _require_supervised(spans: Sequence[tuple[int, int]], least: int) -> None:
    count = sum(end - start for start, end in spans)
    if not count:
        raise BadRow("no supervised token")
    if count < least:
        raise BadRow("too short", f"{count} supervised tokens, data.min_supervised is {least}")
