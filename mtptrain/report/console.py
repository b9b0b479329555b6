"""The report's figures as a table on the console."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtptrain.visible import visible

_WIDTH = 120
"""A narrower table, as rich draws it into a log file, breaks every cell."""
_FIGURES = ("accepted length", "95 % interval", "tokens/target step", "accepted by depth (conditional)")
_COMPARED = ("head", "measured by", "documents", "K", *_FIGURES)
_COST = ("head", "kind", "parameters", "a drafted token", "store, bytes/token", "training", "gate", "exports, proven by")
_COLUMNS = ("measured by", "documents", "K", *_FIGURES)


def print_report(report: dict[str, Any]) -> None:
    """Acceptance by draft length, source and measurement; speed; agreement."""
    table = Table(title="acceptance on held-out documents (greedy)")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for name, s in _rows(report):
        table.add_row(
            name,
            str(s["documents"]),
            str(len(s["accept_rate_per_position"])),
            _number(s["mean_accepted_length"]),
            _interval(s["mean_accepted_length_ci95"]),
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
    if rendering := report.get("rendering"):
        console.print(f"prompts equal in engine and tokenizer: {rendering['equal']} of {rendering['dialogues']} dialogues", highlight=False)


def print_comparison(record: dict[str, Any]) -> None:
    """The heads of a run, the methods measured beside them, and what speaks against comparing them."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    for note in record["notes"]:
        console.print(Text(f"note: {visible(note)}"), soft_wrap=True)
    console.print(_compared(record))
    console.print(_cost(record["heads"]))
    if rows := _speed_of(record):
        console.print(_speed_table(rows))


def _compared(record: dict[str, Any]) -> Table:
    order = "" if record["comparable"] else "; NOT comparable, in order of their names"
    table = Table(title=Text(f"heads of {visible(record['run'])}, each by its strongest measurement{order}"))
    for column in _COMPARED:
        table.add_column(column, justify="left" if column in _COMPARED[:2] else "right", overflow="fold")
    found = [(label, head["measured_by"], head) for label, head in record["heads"].items()]
    found += [(f"engine's own {name}", "engine", one) for name, one in record["baselines"].items() if name != "none"]
    for name, measured_by, one in found:
        table.add_row(
            Text(visible(name)),
            measured_by,
            str(one["documents"]),
            str(one["k"]),
            _number(one["mean_accepted_length"]),
            _interval(one["mean_accepted_length_ci95"]),
            _number(one["tokens_per_target_step"]),
            " ".join(_number(r) for r in one["conditional_accept_rate"]),
        )
    return table


def _cost(heads: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="what they take, and how far they are proven")
    for column in _COST:
        table.add_column(column, justify="right" if column in _COST[2:6] else "left", overflow="fold")
    for label, head in heads.items():
        counted = (head["parameters"], head["parameters_per_drafted_token"], head["store_bytes_per_token"])
        table.add_row(
            Text(visible(label)),
            head["kind"],
            *("-" if value is None else f"{value:,}" for value in counted),
            "-" if head["training_seconds"] is None else f"{head['training_seconds']:.0f} s",
            {True: "open", False: "shut", None: "-"}[head["gate_open"]],
            Text(visible(", ".join(f"{folder}: {proof}" for folder, proof in head["exports"].items()) or "-")),
        )
    return table


def _speed_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """As the rows of a report, the head's label for its method."""
    timed = {visible(label): h["speed"] for label, h in record["heads"].items()}
    timed |= {"no speculation" if name == "none" else f"engine's own {name}": b["speed"] for name, b in record["baselines"].items()}
    return [row | {"method": name} for name, rows in timed.items() for row in rows]


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
        table.add_row(Text(method), *(f"{found[size]:.1f}" if size in found else "-" for size in sizes))
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


def _interval(ci: Sequence[float] | None) -> str:
    return f"{ci[0]:.3f} .. {ci[1]:.3f}" if ci else "-"
