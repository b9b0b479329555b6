"""The target's chat template, as the engine applies it: prompts, continuations, and the spans the target generates.

Everything is checked token by token against the template's own rendering. What can't be exact raises `Inexact` (one
record), or UserError (`check_*`, the template as a whole), with the reason.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from mtptrain.errors import UserError
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids

Message = dict[str, Any]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = "<think>\nwhy\n</think>\n\n"
_ASKED, _WORD = "Why?", "Quokka"


def load_template(folder: Path, trust_remote_code: bool) -> "ChatTemplate":
    """Of the target in `folder`."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    return ChatTemplate(tokenizer, stop_token_ids(folder, tokenizer))


class Inexact(Exception):
    """The template's rendering of a dialogue can't be brought to exact spans. The argument is the reason."""


class ChatTemplate:
    """A tokenizer's chat template. `stop_ids` are the tokens at which generation ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            raise UserError("the target's tokenizer has no chat template; name an instruct model in target.path")
        self.tokenizer = tokenizer
        self.stop_ids = set(stop_ids)
        self.stop_texts = {i: text for i in stop_ids if (text := self.decode([i]))}
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - {tokenizer.unk_token_id}
        self._control_ids = special | self.stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def ids(self, text: str) -> list[int]:
        """Tokens of rendered text, as `apply_chat_template` makes them (the template writes special tokens itself)."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool) -> str:
        """The template's text; with `prompt`, up to where the target starts to generate. Raises Inexact if it refuses."""
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except (jinja2.TemplateError, TypeError) as e:
            raise Inexact(f"the template refuses the dialogue: {str(e).splitlines()[0] if str(e) else type(e).__name__}") from e
        assert isinstance(text, str)
        return text

    def continuation(self, served: str, answer: Sequence[int], messages: list[Message], tools: list[Any] | None) -> tuple[str, list[int]]:
        """(the next prompt's text, the ids that follow `answer`) once the dialogue goes on.

        served: text of the prompt that `answer` (generated ids, end marker included) answers. messages: the whole dialogue,
        that answer included, up to the next assistant turn. Generated ids stay as they are: only what the template puts
        between the end marker and the next assistant turn is tokenised, and checked to be what an engine's own
        tokenisation of the whole text ends with. Raises Inexact if the template writes anything else before it
        (whitespace around the answer excepted: many templates trim it).
        """
        marker = self.stop_texts[answer[-1]]
        text = self.decode(answer[:-1])
        full = self.render(messages, tools, prompt=True)
        for written in (text, text.strip(), text.lstrip(), text.rstrip()):
            head = served + written + marker
            if full.startswith(head):
                break
        else:
            raise Inexact("the template writes an earlier answer otherwise than it was generated")
        ids = self.ids(marker + full[len(head) :])
        between = ids[1:]
        if ids[:1] != [answer[-1]] or not between or self.ids(full)[-len(between) :] != between:
            raise Inexact("the text after an end marker can't be tokenised on its own")
        return full, between

    def kept(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[int], list[tuple[int, int]]]:
        """(tokens, spans) of a dialogue whose assistant turns are in the data: one span an assistant turn, end marker included.

        Raises Inexact if a span is not exactly what follows the prompt that an engine would see.
        """
        text = self.render(messages, tools, prompt=False)
        tokens = self.ids(text)
        if _GENERATION.search(self.tokenizer.get_chat_template(tools=tools)):
            return tokens, self._marked_spans(messages, tools, tokens)
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        return tokens, [self._rendered_span(messages, tools, n, text, tokens) for n in turns]

    def _rendered_span(self, messages: list[Message], tools: list[Any] | None, n: int, text: str, tokens: list[int]) -> tuple[int, int]:
        """Span of assistant message n, from the rendering up to it with a generation prompt and then with it."""
        prompt = self.render(messages[:n], tools, prompt=True)
        turn = self.render(messages[: n + 1], tools, prompt=False)
        if not turn.startswith(prompt):
            raise Inexact("the rendering with an assistant turn does not begin with its prompt")
        end = prompt + self._answer_part(turn[len(prompt) :], messages[n])
        if not text.startswith(end):
            raise Inexact("the template changes an earlier assistant turn once the dialogue goes on (its thinking is dropped, say)")
        start_T, end_T = self.ids(prompt), self.ids(end)
        if tokens[: len(start_T)] != start_T or tokens[: len(end_T)] != end_T:
            raise Inexact("a token spans the border between an assistant turn and what is around it")
        self._require_plain(end_T[len(start_T) :], messages[n])
        return len(start_T), len(end_T)

    def _answer_part(self, tail: str, message: Message) -> str:
        """The beginning of `tail` that the target generates: the text and its end marker, if the template writes one."""
        found = [(tail.index(s), s) for s in self.stop_texts.values() if s in tail]
        if not found:
            core = message["content"].strip()
            at = tail.find(core)
            if at < 0 or tail[:at].strip():
                raise Inexact("the template writes something else before an assistant's text")
            return tail[: at + len(core)]
        at, marker = min(found, key=lambda f: (f[0], -len(f[1])))
        if not self._says(tail[:at], message):
            raise Inexact(f"the template writes {tail[:at][:40]!r} where the assistant's text is {message['content'][:40]!r}")
        return tail[: at + len(marker)]

    def _says(self, written: str, message: Message) -> bool:
        """Whether the template wrote this message's text and nothing else, but for whitespace around it."""
        text = message["content"].strip()
        if any(message.get(key) for key in ("tool_calls", "reasoning_content", "thinking")):
            return text in written
        return written.strip() == text

    def _marked_spans(self, messages: list[Message], tools: list[Any] | None, tokens: list[int]) -> list[tuple[int, int]]:
        """Spans from the template's own {% generation %} blocks, each checked against its message and its prompt."""
        encoded: Any = self.tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        if list(encoded["input_ids"]) != tokens:
            raise Inexact("the tokenizer gives other tokens with a generation mask than without")
        spans = self._end_at_markers(_runs(list(encoded["assistant_masks"])), tokens)
        turns = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) != len(turns):
            raise Inexact(f"{{% generation %}} marks {len(spans)} of {len(turns)} assistant turns")
        for n, (start, end) in zip(turns, spans, strict=True):
            if tokens[:start] != self.ids(self.render(messages[:n], tools, prompt=True)):
                raise Inexact("{% generation %} does not begin where the generation prompt ends")
            body = tokens[start : end - 1] if tokens[end - 1] in self.stop_ids else tokens[start:end]
            if not self._says(self.decode(body), messages[n]):
                raise Inexact("{% generation %} marks something other than the assistant's text")
            self._require_plain(tokens[start:end], messages[n])
        return spans

    def _end_at_markers(self, runs: list[tuple[int, int]], tokens: list[int]) -> list[tuple[int, int]]:
        """Each marked run up to its first end marker; one that stands right behind the run belongs to it."""
        spans = []
        for start, stop in runs:
            reach = min(stop + 1, len(tokens))
            end = next((p + 1 for p in range(start, reach) if tokens[p] in self.stop_ids), stop)
            spans.append((start, end))
        return spans

    def _require_plain(self, span: list[int], message: Message) -> None:
        body = span[:-1] if span and span[-1] in self.stop_ids else span
        if not message.get("tool_calls") and not self._control_ids.isdisjoint(body):
            raise Inexact("an assistant's text holds one of the tokenizer's control tokens")

    def check_prompt(self) -> None:
        """UserError if the generation prompt leaves out the assistant's role marker, which would then be trained."""
        user = [{"role": "user", "content": _ASKED}]
        try:
            prompt, bare = self.render(user, prompt=True), self.render(user, prompt=False)
            turn = self.render([*user, {"role": "assistant", "content": _WORD}], prompt=False)
        except Inexact as e:
            raise _refused(e) from e
        header = turn[len(prompt) :].split(_WORD)[0] if turn.startswith(prompt) else ""
        if prompt == bare and header.strip():
            raise _refused(f"it ignores add_generation_prompt, so that the target would have to generate {header!r} itself")

    def check_history(self, generated: bool) -> None:
        """UserError if a dialogue of several assistant turns can't be exact: earlier ones changed, or (generated) no end marker."""
        user = {"role": "user", "content": _ASKED}
        for answer in (_WORD, _THINKING + _WORD):
            try:
                text = self.render([user, {"role": "assistant", "content": answer}, user], prompt=True)
            except Inexact as e:
                raise _refused(e) from e
            if answer not in text:
                raise _refused("it strips or rewrites the thinking of earlier assistant turns, so an engine would not see what was trained")
            rest = text.split(answer, 1)[1]
            if generated and not rest.startswith(tuple(self.stop_texts.values())):
                raise _refused(f"it writes {rest[:20]!r} after an assistant's text, where the target's end marker would be")

    def check_kept(self) -> None:
        """UserError if no assistant turn can be located exactly, with or without thinking."""
        reasons = []
        for answer in (_WORD, _THINKING + _WORD):
            try:
                self.kept([{"role": "user", "content": _ASKED}, {"role": "assistant", "content": answer}], None)
            except Inexact as e:
                reasons.append(str(e))
        if len(reasons) == 2:
            raise _refused(reasons[0])


def _refused(reason: object) -> UserError:
    return UserError(f"the target's chat template is refused: {reason}; mend chat_template.jinja in target.path")


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """[0, 1, 1, 0, 1] -> [(1, 3), (4, 5)]"""
    edges = [i for i in range(len(mask) + 1) if (mask[i] if i < len(mask) else 0) != (mask[i - 1] if i else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))
