"""Does an engine make the same prompt of a dialogue as the target's tokenizer, which prepared the data?

An engine renders chats itself, with its own version of transformers and its own reading of roles and contents. Where it gives other tokens,
the head is served prompts that it was neither trained nor measured on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtptrain.data.template import ChatTemplate, Inexact, Message

_DIALOGUES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
    [{"role": "user", "content": "  two spaces, a tab\t, and a line's end\n"}],
    [{"role": "user", "content": "žluťoučký 你好 🙂 \u200b <b>&amp;</b> {{ x }} {% y %}"}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nTwo"},
        {"role": "user", "content": "?"},
    ],
)


@dataclass(slots=True, frozen=True)
class Rendering:
    """A dialogue up to where the target generates, and the tokens that its tokenizer makes of it."""

    messages: list[Message]
    tools: list[Any] | None
    tokens: list[int]

    def asked(self) -> dict[str, Any]:
        """What the engine is given."""
        return {"messages": self.messages, "tools": self.tools}


def probes(template: ChatTemplate) -> list[Rendering]:
    """A few dialogues in which engines and tokenizers have differed; those that the template refuses are left out."""
    found = []
    for messages in _DIALOGUES:
        try:
            found.append(Rendering(messages, None, template.ids(template.render(messages, prompt=True))))
        except Inexact:
            continue
    return found


def compare(asked: Sequence[Rendering], engine: Sequence[list[int] | str]) -> dict[str, Any] | None:
    """How many dialogues are equal, the first that is not, and one line about it. `engine`: the tokens of each, or why it refused; empty:
    it was not asked.
    """
    if not engine:
        return None
    differing = [(ours, theirs) for ours, theirs in zip(asked, engine, strict=True) if ours.tokens != theirs]
    found: dict[str, Any] = {"dialogues": len(asked), "equal": len(asked) - len(differing), "first": None, "told": None}
    if differing:
        ours, theirs = differing[0]
        found["first"] = {"messages": ours.messages, "tokenizer": ours.tokens, "engine": theirs}
        found["told"] = (
            f"the engine makes other prompts of {len(differing)} of {len(asked)} dialogues: of {ours.messages[-1]['content'][:40]!r} it "
            f"{_difference(ours.tokens, theirs)}; serve with target.path's template and the version of transformers that prepared the data"
        )
    return found


def _difference(ours: list[int], theirs: list[int] | str) -> str:
    if isinstance(theirs, str):
        return f"makes none ({theirs})"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    here, there = (str(tokens[at]) if at < len(tokens) else "nothing" for tokens in (ours, theirs))
    return f"has {there} where the target's tokenizer has {here}, at token {at}"
