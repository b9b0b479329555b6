"""What report.html is put together from: sections of panels, and the measurements they are about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mtptrain.report.plotting import Figure
from mtptrain.report.wording import MEASUREMENTS


@dataclass(slots=True)
class Table:
    """`rows[i][0]` names the row; `marked`: rows set in bold."""

    columns: list[str]
    rows: list[list[str]]
    marked: Sequence[int] = ()
    words: Sequence[int] = ()
    """Columns of text, which are set flush left."""
    fold_above: int = 16

    @property
    def folded(self) -> bool:
        return len(self.rows) > self.fold_above


@dataclass(slots=True, kw_only=True)
class Panel:
    """A chart, a table, or a chart with its table beside it (below it in a wide panel)."""

    title: str
    note: str = ""
    figure: Figure | None = None
    table: Table | None = None
    wide: bool = False


@dataclass(slots=True)
class Section:
    id: str
    title: str
    lede: str
    panels: list[Panel]
    columns: int = 1
    """Panels beside each other where there is room; a wide one has a row to itself."""
    warnings: list[str] = field(default_factory=list)


def overall(measurement: dict[str, Any] | None) -> dict[str, Any] | None:
    """Statistics over all documents, None where nothing was measured or no draft was made."""
    stats = (measurement or {}).get("overall")
    return stats if stats and stats.get("mean_accepted_length") is not None else None


def strongest(report: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """(name, measurement): engine, else reference decoder, else walk."""
    return next(((n, report[n]) for n in ("engine", "reference", "walk") if overall(report.get(n))), None)


def compared(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The measurements there are, over the same documents where the report has that."""
    same = report.get("same_documents") or {}
    found = {name: same.get(name) or report.get(name) for name in MEASUREMENTS}
    return {name: m for name, m in found.items() if m and overall(m)}
