"""Reports and training logs to test report.html with: made up, but of one piece, as the stages write them."""

from typing import Any

import numpy as np

from mtptrain.decoding.walk import DocumentWalk, Draft
from mtptrain.report.measurement import measure

HOSTILE = "</script><img src=https://example.org/x onerror=\"document.title='broken'\">"
"""Must stay text wherever it stands."""

_RATES = {"chat": 0.62, "code": 0.81, "maths": 0.7, "summaries": 0.55, HOSTILE: 0.66}
_TEXT = (
    "Sure! Here's a short function that adds two numbers:\n\n```python\ndef add(a, b):\n\treturn a + b\n```\n\nIt works for integers, "
    "floats and everything else that defines `__add__`. Shall I add a few tests as well?"
)
_STRANGE = [
    HOSTILE,
    "🦜",
    " naïve",
    "שלום",
    "مرحبا",
    "\u202eevil",
    "&lt;b&gt;",
    "\x1b[31m",
    "\r",
    "\ufffd",
    "",
    "<|im_end|>",
    "W" * 180,
    "\n\n",
]


def walks(documents: int, k: int, rates: dict[str, float], seed: int) -> list[DocumentWalk]:
    """Walks whose token i is accepted with the source's rate times 0.93 ** i."""
    rng = np.random.default_rng(seed)
    found = []
    for n in range(documents):
        source = list(rates)[n % len(rates)]
        walk = DocumentWalk(f"doc-{n:04d}", source, 1, int(rng.integers(60, 190)), [])
        row = 0
        while row + 2 < walk.generated:
            room = min(k, walk.generated - row - 2)
            accepted = 0
            while accepted < room and rng.random() < rates[source] * 0.93**accepted:
                accepted += 1
            walk.drafts.append(Draft(row, [0] * min(accepted + 1, room), accepted))
            row += accepted + 1
        found.append(walk)
    return found


def minimal_report() -> dict[str, Any]:
    """Only the walk was measured."""
    return {
        "schema": 3,
        "target": {"path": "tiny"},
        "head": {"kind": "mtp"},
        "k": 2,
        "walk": measure(walks(6, 2, {"own": 0.4}, 1), 2),
        "reference": None,
        "engine": None,
        "same_documents": None,
    }


def full_report() -> dict[str, Any]:
    """Every part, some of it with hostile or awkward text."""
    k, again = 3, walks(10, 3, _RATES, 2)
    replayed = measure(again, k)
    report = minimal_report() | {
        "target": {"path": "models/SmolLM2-135M-Instruct", "weights": "8513bb425e5bf68b8baa7a10adaf9001", "model_type": "llama"},
        "head": {
            "kind": "mtp",
            "parameters": 4205376,
            "config": {"kind": "mtp", "norms": {"embed": True, "output": True}, "init_std": 0.02, "sliding_window": None},
        },
        "k": k,
        "training": {
            "updates": 2400,
            "tokens": 5192316,
            "supervised_rows": 3125656,
            "seconds": 5272.8742402699954,
            "best_update": 2200,
            "best_mean_accepted_length": 2.479122454832234,
            "parameters": 4205376,
        },
        "walk": measure(walks(60, k, _RATES, 3), k),
        "reference": measure(again, k),
        "engine": measure(walks(10, k, _RATES, 4), k),
        "by_k": {str(n): measure(walks(60, n, _RATES, 3), n) for n in (1, 2, 3, 4, 5)},
        "baselines": {
            "ngram": measure(walks(10, k, {"code": 0.35, "chat": 0.12}, 5), k),
            "draft_model": measure(walks(10, 4, {"code": 0.93, "chat": 0.85}, 6), 4),
        },
        "speed": _speed(),
        "certificate": {
            "between": ["reference", "engine"],
            "drafted_token_agreement": 0.99996,
            "raw_agreement": 0.9731,
            "drafted_tokens_compared": 93127,
            "drafted_token_ties": 2501,
            "output_agreement": 0.9979,
            "raw_output_agreement": 0.9958,
            "output_tokens_compared": 956,
            "target_agreement": 0.9983,
            "raw_target_agreement": 0.9971,
            "target_tokens_compared": 952,
            "output_divergences": [
                {"id": "doc-0003", "token": 71, "tie": True, "margin": 0.0078125},
                {"id": HOSTILE, "token": 12, "tie": False, "margin": 0.34375},
            ],
            "differing_drafts": [
                {"id": HOSTILE, "row": 61, "depth": 2, "token": 94, "margin": 2.86102294921875e-06},
                {"id": "doc-0003", "row": 7, "depth": 0, "token": 5, "margin": None},
            ],
            "tie": "at most two units in the last place of bfloat16 below the best logit",
        },
        "expected_at_temperature_1": {
            "greedy_draft": {"accept_rate_by_step": [0.583, 0.561, 0.522], "expected_accepted_length": 2.081},
            "sampled_draft": {"accept_rate_by_step": [0.641, 0.607, 0.577], "expected_accepted_length": 2.254},
            "rows": 12345,
        },
        "samples": _samples(k),
        "serve": (
            "vllm serve models/SmolLM2-135M-Instruct --speculative-config "
            '\'{"method": "eagle", "model": "runs/smollm2/heads/mtp/export/vllm", "num_speculative_tokens": 3}\' --max-model-len 4096'
        ),
        "proof": "engine",
        "gate": {"min_accepted_length": 1.15, "max_disagreement": 0.02, "open": True, "reasons": []},
        "versions": {"mtptrain": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0", "vllm": "0.20.1"},
    }
    report["same_documents"] = {"walk": replayed, "reference": report["reference"], "engine": report["engine"]}
    return report


def _speed() -> dict[str, Any]:
    rates = {"none": (330.0, 1240.5, 4010.2), "head": (612.4, 2011.9, 4630.1), "ngram": (371.3, 1302.2, 3805.7)}
    rates["draft_model"] = (402.8, 1190.6, 2950.4)
    rows = []
    for method, speeds in rates.items():
        for batch, speed in zip((1, 4, 16), speeds, strict=True):
            tokens = 1024 * batch
            k = None if method == "none" else 4 if method == "draft_model" else 3
            rows.append(
                {"method": method, "batch_size": batch, "k": k, "requests": max(2, batch)}
                | {"tokens": tokens, "seconds": tokens / speed, "tokens_per_second": speed}
            )
    return {"tokens": 128, "rows": rows}


def _samples(k: int) -> list[dict[str, Any]]:
    """Two documents of ordinary text and one of strange tokens."""
    words = [w for part in _TEXT.split("\n") for w in [*_words(part), "\n"]]
    return [
        {"id": "doc-0001", "source": "code", "tokens": _decoded(words, k, 0.75, 7)},
        {"id": "doc-0002", "source": "chat", "tokens": _decoded(words[::-1] * 2, k, 0.5, 8)},
        {"id": HOSTILE, "source": "strange", "tokens": _decoded(_STRANGE * 2, k, 0.6, 9)},
    ]


def _words(text: str) -> list[str]:
    """Each word with the space before it, as tokenizers cut them."""
    first, *rest = text.split(" ")
    return [w for w in (first, *(f" {w}" for w in rest)) if w]


def _decoded(texts: list[str], k: int, rate: float, seed: int) -> list[dict[str, Any]]:
    """Fates as speculation hands them out: up to `k` accepted drafts, then a token of the target."""
    rng = np.random.default_rng(seed)
    tokens: list[dict[str, Any]] = [{"text": texts[0], "fate": "prefill", "rejected": None}]
    depth = 0
    for i, text in enumerate(texts[1:]):
        if depth < k and rng.random() < rate:
            depth += 1
            tokens.append({"text": text, "fate": "accepted", "depth": depth, "rejected": None})
        else:
            tokens.append({"text": text, "fate": "target", "rejected": texts[i // 2] if depth < k else None})
            depth = 0
    return tokens


def training_log(updates: int = 2400, every: int = 10, steps: int = 3) -> list[dict[str, Any]]:
    """Rows of log.jsonl: losses that fall, matches that rise, a held-out walk every 200 updates."""
    rng, rows = np.random.default_rng(0), []
    for update in range(every, updates + 1, every):
        done = update / updates
        match = [(0.72 - 0.07 * s) * (1 - np.exp(-5 * done)) + 0.01 * rng.standard_normal() for s in range(steps)]
        loss = 12 + 16 * np.exp(-4 * done) + 0.3 * rng.standard_normal()
        rows.append({"update": update, "loss": float(loss), "match": [float(m) for m in match]})
        if update % 200 == 0:
            scaled = {source: rate * (1 - np.exp(-5 * done)) for source, rate in _RATES.items()}
            rows.append({"update": update, "walk": measure(walks(20, steps, scaled, 10), steps)["overall"]})
    return rows
