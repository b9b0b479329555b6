"""Acceptance statistics of one measurement: the same shape for the walk, the reference decoder and an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from mtptrain.decoding.walk import DocumentWalk

_RESAMPLES = 1000
_CONFIDENCE = 0.95
_SHORTEST = 128
"""Contexts of fewer tokens are one."""


def measure(walks: Sequence[DocumentWalk], k: int) -> dict[str, Any]:
    """{"k", "overall": {...}, "by_source": {source: {...}}, "by_context": {tokens: {...}}} of drafts of length `k`.

    mean_accepted_length = 1 + accepted / drafts; accept_rate_per_position[i] = drafts whose token i was accepted / drafts (as
    engines count); conditional_accept_rate[i] = drafts whose token i was accepted / drafts that came to compare token i inside
    the span; tokens_per_target_step = generated tokens that did not come from prefill / drafts. Intervals are 95 % bootstrap
    percentiles over documents. by_context has the drafts by how many tokens lie before them: those of `tokens` 512 have 512 to 1,023,
    those of 0 fewer than the smallest power of two there is.
    """
    sources = sorted({w.source for w in walks})
    return {
        "k": k,
        "overall": _statistics(walks, k),
        "by_source": {s: _statistics([w for w in walks if w.source == s], k) for s in sources},
        "by_context": _by_context(walks),
    }


def _by_context(walks: Sequence[DocumentWalk]) -> dict[str, dict[str, Any]]:
    found: dict[int, dict[str, list[int]]] = {}
    for walk in walks:
        counts: dict[int, list[int]] = {}
        for draft in walk.drafts:
            of = counts.setdefault(_power_below(draft.row + 2), [0, 0])  # the first drafted token stands at row + 2
            of[0] += draft.accepted
            of[1] += 1
        for tokens, (accepted, drafts) in counts.items():
            of_context = found.setdefault(tokens, {"accepted": [], "drafts": []})
            of_context["accepted"].append(accepted)
            of_context["drafts"].append(drafts)
    return {
        str(tokens): {
            "documents": len(of["drafts"]),
            "drafts": sum(of["drafts"]),
            "accepted": sum(of["accepted"]),
            "mean_accepted_length": 1 + sum(of["accepted"]) / sum(of["drafts"]),
            "mean_accepted_length_ci95": _interval(of["accepted"], of["drafts"], offset=1.0),
        }
        for tokens, of in sorted(found.items())
    }


def _power_below(tokens: int) -> int:
    """The largest power of two that is not above, from `_SHORTEST` on; 0 below that."""
    return 1 << (tokens.bit_length() - 1) if tokens >= _SHORTEST else 0


def _statistics(walks: Sequence[DocumentWalk], k: int) -> dict[str, Any]:
    drafts = [d for w in walks for d in w.drafts]
    count = len(drafts)
    accepted = [sum(d.accepted > i for d in drafts) for i in range(k)]
    compared = [sum(len(d.tokens) > i for d in drafts) for i in range(k)]
    decoded = [w.generated - w.spans for w in walks]
    per_document = [len(w.drafts) for w in walks]
    accepted_per_document = [sum(d.accepted for d in w.drafts) for w in walks]
    return {
        "documents": len(walks),
        "generated_tokens": sum(w.generated for w in walks),
        "drafts": count,
        "accepted": sum(accepted),
        "mean_accepted_length": 1 + sum(accepted) / count if count else None,
        "mean_accepted_length_ci95": _interval(accepted_per_document, per_document, offset=1.0),
        "accept_rate_per_position": [a / count if count else None for a in accepted],
        "conditional_accept_rate": [a / c if c else None for a, c in zip(accepted, compared, strict=True)],
        "tokens_per_target_step": sum(decoded) / count if count else None,
        "tokens_per_target_step_ci95": _interval(decoded, per_document, offset=0.0),
    }


def _interval(numerators: list[int], denominators: list[int], offset: float) -> list[float] | None:
    """Bootstrap interval of offset + sum(numerators) / sum(denominators) over documents; None for fewer than two with drafts."""
    pairs = [(n, d) for n, d in zip(numerators, denominators, strict=True) if d]
    if len(pairs) < 2:
        return None
    n, d = (np.array(x, dtype=float) for x in zip(*pairs, strict=True))
    if len(set(pairs)) == 1:
        return [offset + n[0] / d[0]] * 2
    result = bootstrap(
        (n, d),
        lambda a, b, axis=-1: offset + a.sum(axis) / b.sum(axis),
        n_resamples=_RESAMPLES,
        paired=True,
        vectorized=True,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return [float(result.confidence_interval.low), float(result.confidence_interval.high)]
