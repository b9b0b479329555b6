"""report.json: one versioned schema for every stage of proof.

schema                1
target, head          what was measured: paths, hashes, shapes
k                     draft length of the gate and of `walk`, `reference`, `engine`
training              updates, tokens, supervised rows, seconds
walk                  measurement (report/measurement.py), the offline walk over all held-out documents
reference             the same shape, real target and real draft in plain torch; null until measured
engine                the same shape, a serving engine; null until measured
same_documents        walk over the documents that `reference` (and `engine`) ran, to compare like with like
by_k                  {"1": measurement, ...} of the walk at other draft lengths
expected_at_temperature_1
                      sampling: {"greedy_draft", "sampled_draft": {"accept_rate_by_step", "expected_accepted_length"}, "rows", "note"},
                      expectations from stored states over every valid row, nothing drawn (stages/walk.py); rates of a step without rows
                      are null
certificate           agreement of the measurements; null until two of them exist
gate                  thresholds, and whether they are met
versions              of everything that ran
"""

from typing import Any

from mtptrain.decoding.compare import Agreement

SCHEMA = 1
REPORT = "report.json"


def certificate(drafts: Agreement, outputs: Agreement, divergences: list[dict[str, Any]]) -> dict[str, Any]:
    """How far walk, reference and engine agree. `divergences`: documents whose outputs differ, where and whether it was a tie."""
    return {
        "between": ["walk", "reference"],
        "drafted_token_agreement": drafts.agreement,
        "raw_agreement": drafts.raw,
        "drafted_tokens_compared": drafts.compared,
        "drafted_token_ties": drafts.ties,
        "output_agreement": outputs.agreement,
        "raw_output_agreement": outputs.raw,
        "output_tokens_compared": outputs.compared,
        "output_divergences": divergences,
        "tie": "at most two units in the last place of bfloat16 below the best logit",
    }


def gate(
    measured: dict[str, Any], found: dict[str, Any] | None, min_accepted_length: float, max_disagreement: float
) -> tuple[dict[str, Any], list[str]]:
    """The gate's record and the reasons why it is shut (empty: it is open).

    `measured`: the strongest measurement there is; `found`: the certificate, None where only one measurement was asked for.
    """
    length = measured["overall"]["mean_accepted_length"]
    reasons = []
    if length is None:
        reasons.append("no draft was made: the held-out documents have no supervised rows")
    elif length < min_accepted_length:
        reasons.append(f"mean accepted length {length:.3f} is below validate.min_accepted_length={min_accepted_length}")
    for kind in ("drafted_token_agreement", "output_agreement"):
        if found is not None and 1 - found[kind] > max_disagreement:
            reasons.append(f"{kind} {found[kind]:.4f} is below 1 - validate.max_disagreement={max_disagreement}")
    record = {"min_accepted_length": min_accepted_length, "max_disagreement": max_disagreement, "open": not reasons, "reasons": reasons}
    return record, reasons
