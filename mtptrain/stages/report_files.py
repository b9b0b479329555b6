"""report.json and report.html in a head's report folder: written together, and read only as they were measured."""

from typing import Any

from mtptrain import manifest
from mtptrain.config import Config
from mtptrain.config_io import config_yaml
from mtptrain.errors import UserError
from mtptrain.files import hash_json, read_json, read_jsonl_durable, write_json, write_text
from mtptrain.report.page import PAGE, write_report_page
from mtptrain.report.schema import REPORT
from mtptrain.trainer import LOG

_JUDGED = ("gate", "serve")
"""What thresholds decide anew; all else is measured."""


def write_report(cfg: Config, report: dict[str, Any]) -> None:
    write_text(cfg.report_dir / "config.yaml", config_yaml(cfg))
    write_json(cfg.report_dir / REPORT, report)
    write_report_page(cfg.report_dir / PAGE, report, read_jsonl_durable(cfg.train_dir / LOG))


def measured_hash(report: dict[str, Any]) -> str:
    """Of everything measured; the manifest keeps it."""
    return hash_json({key: value for key, value in report.items() if key not in _JUDGED})


def read_report(cfg: Config) -> dict[str, Any]:
    """The finished report. UserError where it is not the one that was measured."""
    found = manifest.require(cfg.report_dir, "the validation report", "python -m mtptrain.validate (with the same arguments)")
    report: dict[str, Any] = read_json(cfg.report_dir / REPORT)
    if not isinstance(report, dict) or measured_hash(report) != found["results"].get("report"):
        raise UserError(
            f"{cfg.report_dir / REPORT} is not what was measured (changed or damaged); delete {cfg.report_dir / manifest.MANIFEST} and run "
            "python -m mtptrain.validate (with the same arguments) again: finished engine runs are kept"
        )
    return report
