"""The target answers every dialogue, turn after turn; each answer is on disk before it counts, so a killed run goes on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from mtptrain.data.dialogues import Dialogue
from mtptrain.data.responses import Completed, Generate, Request
from mtptrain.data.template import ChatTemplate
from mtptrain.files import append_jsonl, hash_json, read_jsonl_durable

FILE = "responses.jsonl"


class AnswerFile:
    """Generated ids by (document, turn, prompt): an answer is used again only for the very prompt it was made for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, int, str], list[int]] = {
            (r["id"], r["turn"], r["prompt"]): r["tokens"] for r in read_jsonl_durable(path)
        }

    def find(self, dialogue: Dialogue) -> list[int] | None:
        return self._known.get(_key(dialogue))

    def add(self, answers: Sequence[tuple[Dialogue, Completed]]) -> None:
        """Append, durably, answers to dialogues that have not accepted them yet."""
        rows = []
        for dialogue, completed in answers:
            name, turn, prompt = _key(dialogue)
            rows.append({"id": name, "turn": turn, "prompt": prompt, "tokens": completed.tokens, "hit_limit": completed.hit_limit})
        append_jsonl(self.path, rows)


def answer_dialogues(dialogues: Sequence[Dialogue], template: ChatTemplate, file: AnswerFile, generate: Generate, most_prompt: int) -> None:
    """Answer every turn that can be answered: all first turns, then all second ones, and so on.

    most_prompt: tokens a prompt may have. `generate` is not called where every answer is already in the file.
    """
    waiting = list(dialogues)
    while waiting:
        new = []
        for dialogue in waiting:
            known = file.find(dialogue)
            if known is None:
                new.append(dialogue)
            else:
                dialogue.accept(known, template, most_prompt)
        for dialogue, completed in _generated(new, file, generate):
            dialogue.accept(completed.tokens, template, most_prompt)
        waiting = [d for d in waiting if not d.ended]


def _generated(dialogues: Sequence[Dialogue], file: AnswerFile, generate: Generate) -> Iterator[tuple[Dialogue, Completed]]:
    """New answers as they come, already on disk."""
    if not dialogues:
        return
    asked = {f"{d.record.id}#{len(d.spans)}": d for d in dialogues}
    assert len(asked) == len(dialogues), "document ids are not unique"
    turn = len(dialogues[0].spans) + 1
    tokens = 0
    batches = generate([Request(id=name, prompt=d.tokens) for name, d in asked.items()])  # loads the model: before the clock starts
    with tqdm(total=len(dialogues), desc=f"responses, turn {turn}", unit="resp", mininterval=1) as bar:
        for batch in batches:
            answers = [(asked.pop(c.id), c) for c in batch]
            file.add(answers)
            tokens += sum(len(c.tokens) for c in batch)
            bar.update(len(batch))
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / elapsed:,.0f} tok/s" if elapsed > 0 else "", refresh=False)
            yield from answers
    assert not asked, f"{len(asked)} requests were not answered"


def _key(dialogue: Dialogue) -> tuple[str, int, str]:
    return dialogue.record.id, len(dialogue.spans), hash_json(dialogue.tokens)
