"""The report's figures as a table on the console."""

from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 120
"""A narrower table, as rich draws it into a log file, breaks every cell."""
_COLUMNS = ("measured by", "documents", "K", "accepted length", "95 % interval", "tokens/target step", "accepted by depth (conditional)")


def print_report(report: dict[str, Any]) -> None:
    """Acceptance by draft length, source and measurement; speed; agreement."""
    table = Table(title="acceptance on held-out documents (greedy)")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for name, s in _rows(report):
        interval = s["mean_accepted_length_ci95"]
        table.add_row(
            name,
            str(s["documents"]),
            str(len(s["accept_rate_per_position"])),
            _number(s["mean_accepted_length"]),
            f"{interval[0]:.3f} .. {interval[1]:.3f}" if interval else "-",
            _number(s["tokens_per_target_step"]),
            " ".join(_number(r) for r in s["conditional_accept_rate"]),
        )
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    if report["speed"] and report["speed"]["rows"]:
        console.print(_speed_table(report["speed"]["rows"]))
    for line in _agreement(report["certificate"]):
        console.print(line, highlight=False)


def _rows(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rows = [(f"walk, K={k}", m["overall"]) for k, m in report["by_k"].items()]
    rows += [(f"walk, {source}", s) for source, s in report["walk"]["by_source"].items()]
    if same := report["same_documents"]:
        rows += [(f"{name}, same documents", same[name]["overall"]) for name in ("walk", "reference", "engine") if same[name]]
    for name, measured in (report["baselines"] or {}).items():
        rows.append((f"engine's own {name}", measured["overall"]))
    return rows


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="engine, tokens/s")
    sizes = sorted({row["batch_size"] for row in rows})
    table.add_column("draft")
    for size in sizes:
        table.add_column(f"batch {size}", justify="right")
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {row["batch_size"]: row["tokens_per_second"] for row in rows if row["method"] == method}
        table.add_row(method, *(f"{found[size]:.1f}" if size in found else "-" for size in sizes))
    return table


def _agreement(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = [_agreement_line(found)]
    if (offline := found.get("walk_and_reference")) is not None:
        lines.append(_agreement_line(offline))
    return lines


def _agreement_line(found: dict[str, Any]) -> str:
    return (
        f"drafted tokens equal in {' and '.join(found['between'])}: {found['drafted_token_agreement']:.4f} "
        f"({found['drafted_tokens_compared']} compared, {found['drafted_token_ties']} ties, raw {found['raw_agreement']:.4f}); "
        f"output equal to the target's own: {found['output_agreement']:.4f} ({found['output_tokens_compared']} tokens)"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
