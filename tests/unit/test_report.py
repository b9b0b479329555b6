"""The gate and the certificate by hand-made numbers."""

from typing import Any

import pytest

from mtptrain.decoding.compare import Agreement
from mtptrain.decoding.walk import DocumentWalk, Draft
from mtptrain.report.measurement import measure
from mtptrain.report.schema import certificate, gate, strongest


def report(length: float | None, found: dict[str, Any] | None, engine: float | None = None) -> dict[str, Any]:
    """The parts that the gate reads."""
    return {
        "walk": {"overall": {"mean_accepted_length": length}},
        "reference": None,
        "engine": engine and {"overall": {"mean_accepted_length": engine}},
        "certificate": found and {"between": ["walk", "reference"], "drafted_tokens_compared": 100, **found},
    }


def test_certificate_counts_ties_as_agreement_and_keeps_the_raw_figure() -> None:
    found = certificate(["walk", "reference"], Agreement(equal=95, ties=4, compared=100), Agreement(equal=50, ties=0, compared=50), [], "")
    assert (found["drafted_token_agreement"], found["raw_agreement"], found["output_agreement"]) == (0.99, 0.95, 1.0)


@pytest.mark.parametrize(
    ("length", "drafts", "outputs", "reasons"),
    [
        (1.4, 1.0, 1.0, []),
        (1.2, 1.0, 1.0, ["mean accepted length 1.200 is below"]),
        (1.4, 0.95, 1.0, ["drafted_token_agreement 0.9500 is below"]),
        (1.4, 1.0, 0.5, ["output_agreement 0.5000 is below"]),
        (None, 1.0, 1.0, ["no draft was made"]),
    ],
)
def test_gate(length: float | None, drafts: float, outputs: float, reasons: list[str]) -> None:
    found = {"drafted_token_agreement": drafts, "output_agreement": outputs}
    record = gate(report(length, found), min_accepted_length=1.3, max_disagreement=0.02)
    assert record["open"] == (not reasons)
    assert len(record["reasons"]) == len(reasons)
    for reason, expected in zip(record["reasons"], reasons, strict=True):
        assert expected.partition(" ")[0] in reason
        assert expected.partition(" ")[2] in reason


def test_acceptance_by_context_counts_each_draft_where_its_first_token_stands() -> None:
    """The first drafted token of row p stands at p + 2, so it has p + 2 tokens before it."""
    rows = [(10, 1), (125, 3), (126, 2), (254, 0), (600, 1), (1021, 2), (1022, 3)]
    walks = [DocumentWalk("a", "x", 1, 2000, [Draft(row, [0] * 3, accepted) for row, accepted in rows])]
    walks.append(DocumentWalk("b", "y", 1, 30, [Draft(4, [0] * 3, 0)]))
    found = measure(walks, 3)["by_context"]
    assert {n: (s["documents"], s["drafts"], s["accepted"]) for n, s in found.items()} == {
        "0": (2, 3, 4),
        "128": (1, 1, 2),
        "256": (1, 1, 0),
        "512": (1, 2, 3),
        "1024": (1, 1, 3),
    }
    assert found["512"]["mean_accepted_length"] == 2.5
    assert sum(s["drafts"] for s in found.values()) == measure(walks, 3)["overall"]["drafts"]


def test_gate_without_a_second_measurement_asks_for_the_length_alone() -> None:
    assert gate(report(1.4, None), 1.3, 0.0)["reasons"] == []


def test_the_strongest_measurement_is_the_engines() -> None:
    assert strongest(report(1.4, None, engine=1.2))[0] == "engine"
    assert gate(report(1.4, None, engine=1.2), 1.3, 0.0)["reasons"]


def test_the_walks_agreement_counts_beside_the_engines() -> None:
    good = {"drafted_token_agreement": 1.0, "output_agreement": 1.0}
    bad = {"between": ["walk", "reference"], "drafted_token_agreement": 0.5, "output_agreement": 1.0}
    (reason,) = gate(report(1.4, {**good, "walk_and_reference": bad}), 1.3, 0.02)["reasons"]
    assert "walk and reference" in reason


def test_a_certificate_over_nothing_is_none() -> None:
    """An engine that never drafts agrees with everything."""
    nothing = {"drafted_token_agreement": 1.0, "output_agreement": 1.0, "drafted_tokens_compared": 0}
    (reason,) = gate(report(1.4, nothing), 1.3, 0.02)["reasons"]
    assert "nothing was drafted" in reason
