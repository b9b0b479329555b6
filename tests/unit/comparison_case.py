"""Reports of several heads of one run to compare: tests/unit/report_case.py's with changes, of one piece as the stages write them."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

from tests.unit.report_case import HOSTILE, full_report


@functools.cache
def _full() -> dict[str, Any]:
    return full_report()


def report_of(kind: str, length: float, **head: Any) -> dict[str, Any]:
    """The full report of a head of this kind whose engine accepted `length`."""
    report = copy.deepcopy(_full())
    report["head"] = {
        "kind": kind,
        "parameters": 4_000_000,
        "parameters_per_drafted_token": 32_000_000,
        "captures": ["final"],
        "draft_vocabulary": 49152,
        "store_bytes_per_token": 1157,
    } | head
    report["engine"]["overall"]["mean_accepted_length"] = length
    report["engine"]["overall"]["mean_accepted_length_ci95"] = [length - 0.125, length + 0.25]
    return report


def four_heads() -> dict[str, dict[str, Any]]:
    """Three kinds, and one whose label is hostile."""
    dear = {"captures": ["after_1", "after_14", "after_26"], "draft_vocabulary": 8000, "parameters_per_drafted_token": 9_500_000}
    heads = {
        "mtp": report_of("mtp", 1.5),
        "eagle": report_of("eagle", 1.25),
        "eagle3": report_of("eagle3", 2.0, **dear),
        HOSTILE.replace("/", "_"): report_of("mtp", 1.375),
    }
    for number, report in enumerate(heads.values(), 1):
        report["training"]["seconds"] = 100.0 * number
        for row in report["speed"]["rows"]:
            if row["method"] == "head":
                row["tokens_per_second"] *= number
    heads["eagle"]["gate"] = {"open": False, "reasons": ["mean accepted length 1.250 is below validate.min_accepted_length=1.3"]}
    return heads


def write_run(folder: Path, reports: dict[str, dict[str, Any]]) -> Path:
    """A run's folder with these reports."""
    for label, report in reports.items():
        path = folder / "heads" / label / "report" / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(report), encoding="utf-8")
    return folder


def write_export(folder: Path, label: str, name: str, about: Any) -> Path:
    """mtptrain.json of one exported folder of a head."""
    path = folder / "heads" / label / "export" / name / "mtptrain.json"
    path.parent.mkdir(parents=True)
    path.write_text(about if isinstance(about, str) else json.dumps(about), encoding="utf-8")
    return path
