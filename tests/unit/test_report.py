"""The gate and the certificate by hand-made numbers."""

from typing import Any

import pytest

from mtptrain.decoding.compare import Agreement
from mtptrain.report.schema import certificate, gate


def measured(length: float | None) -> dict[str, Any]:
    return {"overall": {"mean_accepted_length": length}}


def test_certificate_counts_ties_as_agreement_and_keeps_the_raw_figure() -> None:
    found = certificate(Agreement(equal=95, ties=4, compared=100), Agreement(equal=50, ties=0, compared=50), [])
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
    record, shut = gate(measured(length), found, min_accepted_length=1.3, max_disagreement=0.02)
    assert record["open"] == (not reasons)
    assert len(shut) == len(reasons)
    for reason, expected in zip(shut, reasons, strict=True):
        assert expected in reason


def test_gate_without_a_second_measurement_asks_for_the_length_alone() -> None:
    assert gate(measured(1.4), None, 1.3, 0.0)[1] == []
