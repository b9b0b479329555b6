"""report.json: one versioned schema for every stage of proof.

schema                3
target                what the head drafts for: path, hash
head                  kind, label, config; parameters, parameters_per_drafted_token (what one drafted token is multiplied with, the output
                      projection included), captures, draft_vocabulary (ids), store_bytes_per_token (of the captures its training reads)
layout                of the vLLM folder that was measured; null where the head is not exported for vLLM
k                     draft length of the gate and of `walk`, `reference`, `engine`
training              updates, tokens, supervised rows, seconds
walk                  measurement (report/measurement.py), the offline walk over all held-out documents: overall, by source, and by how
                      many tokens lie before a draft
reference             the same shape, real target and real draft in plain torch; null until measured
engine                the same shape, the serving engine on the exported folder; null until measured
same_documents        {"walk", "reference", "engine"}: all three over the documents that the fewest of them ran; null with the walk alone
by_k                  {"1": measurement, ...} of the walk at other draft lengths
baselines             {"ngram": measurement, ...}: the engine's own drafts on the same prompts; a decode step without a draft counts
speed                 {"rows": [{"method", "batch_size", "k", "requests", "tokens", "seconds", "tokens_per_second"}]} of the engine
counters              the engine's own counters of the head's run, uncut
certificate           agreement of the two strongest measurements; null until two of them exist
samples               a few answers of the engine, token by token: who wrote it, what was rejected
proof                 engine, reference or walk: the strongest measurement there is
serve                 the command that serves the head
expected_at_temperature_1
                      sampling: {"greedy_draft", "sampled_draft": {"accept_rate_by_step", "expected_accepted_length"}, "rows", "note"},
                      expectations from stored states over every valid row, nothing drawn (stages/walk.py); rates of a step without rows
                      are null
rendering             {"dialogues", "equal", "first", "told"}: prompts made by the engine and by the target's tokenizer
                      (stages/rendering.py); null without an engine
codec_error           of the states that training read: codec and mean relative error of each capture, the teacher's divergence (nats) and
                      changed first choices, over `rows` held-out rows coded for the purpose (stages/codec_error.py)
gate                  thresholds, and whether they are met
versions              of everything that ran
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reports are read without torch
    from mtptrain.decoding.compare import Agreement

SCHEMA = 3
REPORT = "report.json"


def certificate(
    between: list[str], drafts: "Agreement", outputs: "Agreement", divergences: list[dict[str, Any]], tie: str
) -> dict[str, Any]:
    """How far two measurements agree. `divergences`: documents whose outputs differ, where and whether it was a tie."""
    return {
        "between": between,
        "drafted_token_agreement": drafts.agreement,
        "raw_agreement": drafts.raw,
        "drafted_tokens_compared": drafts.compared,
        "drafted_token_ties": drafts.ties,
        "output_agreement": outputs.agreement,
        "raw_output_agreement": outputs.raw,
        "output_tokens_compared": outputs.compared,
        "output_divergences": divergences,
        "tie": tie,
    }


def strongest(report: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The strongest measurement of a report and its name."""
    name = next(n for n in ("engine", "reference", "walk") if report[n])
    return name, report[name]


def gate(report: dict[str, Any], min_accepted_length: float, max_disagreement: float) -> dict[str, Any]:
    """The gate's record: thresholds, and the reasons why it is shut (none: it is open)."""
    _, measured = strongest(report)
    length = measured["overall"]["mean_accepted_length"]
    reasons = []
    if length is None:
        reasons.append("no draft was made: the held-out documents have no supervised rows")
    elif length < min_accepted_length:
        reasons.append(f"mean accepted length {length:.3f} is below validate.min_accepted_length={min_accepted_length}")
    found = report["certificate"]
    if found and not found["drafted_tokens_compared"]:
        reasons.append(f"no drafted token of {' and '.join(found['between'])} could be compared: nothing was drafted")
    for compared in [found, found.get("walk_and_reference")] if found else []:
        for kind in ("drafted_token_agreement", "output_agreement"):
            if compared and 1 - compared[kind] > max_disagreement:
                names = " and ".join(compared["between"])
                reasons.append(f"{kind} of {names} {compared[kind]:.4f} is below 1 - validate.max_disagreement={max_disagreement}")
    if (rendering := report.get("rendering")) and rendering["told"]:
        reasons.append(rendering["told"])
    return {"min_accepted_length": min_accepted_length, "max_disagreement": max_disagreement, "open": not reasons, "reasons": reasons}
