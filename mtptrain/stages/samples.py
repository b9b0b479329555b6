"""A few of the engine's answers, token by token, for the report: who wrote each, and which drafted token was rejected there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtptrain.engines.vllm import Answer, EngineRun
from mtptrain.stages.train import spread
from mtptrain.store.reader import Store
from mtptrain.target.tokenizer import load_tokenizer

_SAMPLES = 4
_TOKENS = 160


def heat_strips(target: Path, trust_remote_code: bool, store: Store, documents: Sequence[int], run: EngineRun) -> list[dict[str, Any]]:
    """First answers of a few documents: [{"id", "source", "tokens": [{"text", "fate", "depth", "rejected"}]}]."""
    tokenizer = load_tokenizer(target, trust_remote_code)

    def text(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    samples = []
    for i in spread([i for i in documents if f"{i}.0" in run.answers], _SAMPLES):
        entry = store.entries[i]
        fates = token_fates(run.answers[f"{i}.0"], entry.spans[0][0])
        samples.append(
            {
                "id": entry.id,
                "source": entry.source,
                "tokens": [{"text": text(t), **fate, "rejected": None if r is None else text(r)} for t, fate, r in fates[:_TOKENS]],
            }
        )
    return samples


def token_fates(found: Answer, start: int) -> list[tuple[int, dict[str, Any], int | None]]:
    """(token, {"fate": prefill | accepted | target, "depth"}, drafted token rejected in its place) of each generated token."""
    fates: list[tuple[dict[str, Any], int | None]] = [({"fate": "target", "depth": None}, None) for _ in found.tokens]
    if fates:
        fates[0] = ({"fate": "prefill", "depth": None}, None)
    for step in found.steps:
        first = step.row + 2 - start
        for depth in range(step.accepted):
            if first + depth < len(fates):
                fates[first + depth] = ({"fate": "accepted", "depth": depth + 1}, None)
        at = first + step.accepted
        if step.accepted < len(step.drafted) and at < len(fates):
            fates[at] = ({"fate": "target", "depth": None}, step.drafted[step.accepted])
    return [(token, fate, rejected) for token, (fate, rejected) in zip(found.tokens, fates, strict=True)]
