"""The compare stage: the heads of a run side by side, from the reports that validate wrote."""

from typing import Any

from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.files import write_json
from mtptrain.report.comparison import COMPARISON, compare_run
from mtptrain.report.comparison_page import COMPARISON_PAGE, write_comparison_page
from mtptrain.report.console import print_comparison
from mtptrain.visible import visible


def run(cfg: Config) -> None:
    """Write comparison.json and comparison.html into the run's folder, print the table. UserError for fewer than two reports."""
    record = _read(cfg)
    if len(record["heads"]) < 2:
        there = f"only {next(iter(record['heads']))} has one" if record["heads"] else "there is none"
        raise UserError(
            f"{cfg.run_dir}: a comparison needs the reports of two heads and {there}; make them with: python -m mtptrain.train -m "
            "head=mtp,eagle3 (with the same arguments)"
        )
    _write(cfg, record)


def after_sweep(cfg: Config) -> None:
    """The same for a run that a sweep ended with; nothing where there is nothing to compare."""
    record = _read(cfg)
    if len(record["heads"]) > 1:
        _write(cfg, record)


def _read(cfg: Config) -> dict[str, Any]:
    """The record; what had to be left out is said."""
    record = compare_run(cfg.run_dir)
    for line in record["left_out"]:
        print(f"compare: {visible(line)}", flush=True)
    return record


def _write(cfg: Config, record: dict[str, Any]) -> None:
    write_json(cfg.run_dir / COMPARISON, record)
    write_comparison_page(cfg.run_dir / COMPARISON_PAGE, record)
    print_comparison(record)
    print(f"compare: {cfg.run_dir / COMPARISON_PAGE} and {COMPARISON}", flush=True)
