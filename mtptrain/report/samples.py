"""Sample outputs in report.html: a strip of chips, one a token, by what became of the token.

Texts are as hostile as prompts and models make them: escaped, control characters shown as pictures, each chip's direction its own.
"""

from typing import Any

from markupsafe import Markup, escape

from mtptrain.report.wording import count, percent
from mtptrain.visible import visible

_OPEN_SAMPLES = 2


def samples(report: dict[str, Any]) -> dict[str, Any] | None:
    """Generated documents as chips, one a token, by what became of the token."""
    found = report.get("samples")
    if not found:
        return None
    depths = max(1, report.get("k") or 0, *(t.get("depth") or 0 for s in found for t in s["tokens"]))
    return {
        "id": "samples",
        "title": "Sample outputs",
        "depths": [(d, d / depths) for d in range(1, depths + 1)],
        "samples": [_sample(s, depths, number < _OPEN_SAMPLES) for number, s in enumerate(found)],
    }


def _sample(sample: dict[str, Any], depths: int, shown: bool) -> dict[str, Any]:
    tokens = sample["tokens"]
    accepted = sum(t["fate"] == "accepted" for t in tokens)
    share = f" ({percent(accepted / len(tokens))})" if tokens else ""
    return {
        "id": str(sample.get("id", "")),
        "source": str(sample.get("source") or ""),
        "summary": f"{count(len(tokens))} tokens, {count(accepted)} of them drafted{share}",
        "shown": shown,
        "chips": [
            {
                "fate": t["fate"],
                "text": t["text"],
                "rejected": t.get("rejected"),
                "level": (t.get("depth") or 0) / depths,
                "title": _fate(t),
            }
            for t in tokens
        ],
    }


def _fate(token: dict[str, Any]) -> str:
    if token["fate"] == "accepted":
        return f"drafted at depth {token.get('depth')}, accepted"
    if token["fate"] == "prefill":
        return "emitted by prefill"
    if token.get("rejected") is not None:
        return f"the target's own; the draft had {visible(token['rejected'])!r}"
    return "the target's own, after a draft that was accepted whole or where none was made"


def lines(text: str) -> Markup:
    """Token text with its newlines shown and kept."""
    return escape(visible(text)).replace("\n", Markup('<i class="newline"></i><br>'))


def line(text: str) -> Markup:
    """Token text on one line."""
    return escape(visible(text)).replace("\n", Markup('<i class="newline"></i>'))
