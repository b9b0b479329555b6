"""Charts of report.html (report/plotting.py says of what kind)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtptrain.report.plotting import (
    LEGEND_ROW,
    NO_SPECULATION,
    Figure,
    axis_of,
    figure_of,
    hatching,
    hover_interval,
    label_text,
    room,
    whiskers,
)

_VALUES_UP_TO = 5
"""Draft lengths whose bars have room for their values."""
_CURVE_POINTS = 1500
_SYMBOLS = {"walk": "circle", "reference": "square", "engine": "diamond"}
_COLOURS = {"none": "--none", "head": "--head", "ngram": "--ngram", "draft_model": "--draft-model"}
_HATCHES = {"ngram": "/", "draft_model": "x"}
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(slots=True, kw_only=True)
class Estimate:
    """One row of `forest`: a value with its 95 % interval, if it has one."""

    label: str
    value: float
    ci: Sequence[float] | None
    colour: str = "--head"
    symbol: str = "circle"


@dataclass(slots=True, kw_only=True)
class Bars:
    """Tokens a second by batch size."""

    values: dict[int, float]
    colour: str
    hatch: str


def forest(rows: Sequence[Estimate], axis: str, show_values: bool) -> Figure:
    """Values as dots with their intervals as whiskers, one below the other; a dotted line at 1, where speculation yields nothing."""
    traces = []
    for i, row in enumerate(rows):
        traces.append(
            {
                "type": "scatter",
                "x": [row.value],
                "y": [-i],
                "mode": "markers+text" if show_values else "markers",
                "text": [f"{row.value:.3f}"],
                "textposition": "top center",
                "marker": {"color": row.colour, "size": 10, "symbol": row.symbol, "line": {"width": 2, "color": row.colour}},
                "error_x": whiskers([row.value], [row.ci], row.colour),
                "hovertemplate": f"{label_text(row.label)}: %{{x:.3f}}{hover_interval(row.ci)}<extra></extra>",
                "showlegend": False,
            }
        )
    ends = [1.0] + [x for row in rows for x in (row.value, *(row.ci or ()))]
    return figure_of(
        traces,
        height=(46 if show_values else 27) * len(rows) + 62,
        xaxis=axis_of(axis, range=room(ends, 0.06), zeroline=False),
        yaxis=axis_of(
            None,
            tickvals=[-i for i in range(len(rows))],
            ticktext=[label_text(row.label) for row in rows],
            range=[0.6 - len(rows), 0.7 if show_values else 0.6],
            showgrid=False,
            zeroline=False,
        ),
        shapes=[NO_SPECULATION],
    )


def depth_bars(unconditional: Sequence[float | None], conditional: Sequence[float | None]) -> Figure:
    """Acceptance by depth, of all drafts and of those that reached the depth."""
    depths = [str(i + 1) for i in range(len(unconditional))]
    series = [("of all drafts", unconditional, "--head", ""), ("of drafts that reached it", conditional, "--second", "/")]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": depths,
            "y": list(values),
            "marker": {"color": colour, "pattern": hatching(shape)},
            "texttemplate": "%{y:.0%}" if len(depths) <= _VALUES_UP_TO else "",
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": f"depth %{{x}}, {name}: %{{y:.1%}}<extra></extra>",
        }
        for name, values, colour, shape in series
    ]
    return figure_of(
        traces,
        barmode="group",
        bargap=0.3,
        xaxis=axis_of("depth of the drafted token", type="category"),
        yaxis=axis_of("accepted", tickformat=".1~%", rangemode="tozero"),
    )


def length_by_k(by_k: dict[int, dict[str, Any]]) -> Figure:
    """Accepted length over the draft length; `by_k`: K -> statistics."""
    ks = [k for k, s in by_k.items() if s["mean_accepted_length"] is not None]
    trace = _estimates("", [by_k[k] for k in ks], ks, "draft length %{x}")
    return figure_of([trace], xaxis=axis_of("draft length K", dtick=1), yaxis=axis_of("accepted length"), showlegend=False)


def loss_curve(rows: Sequence[dict[str, Any]]) -> Figure:
    rows = thinned(rows)
    trace = _curve("loss", [r["update"] for r in rows], [_finite(r["loss"]) for r in rows], "--head", "solid", ".4f")
    return figure_of([trace], xaxis=axis_of("update"), yaxis=axis_of(None), showlegend=False)


def match_curves(rows: Sequence[dict[str, Any]]) -> Figure:
    """Share of rows whose most likely token is the teacher's, a line for each unrolled step."""
    rows = thinned(rows)
    steps = max(len(r["match"]) for r in rows)
    traces = [
        _curve(
            f"step {k + 1}",
            [r["update"] for r in rows],
            [_finite(r["match"][k]) if k < len(r["match"]) else None for r in rows],
            f"--line {1 - k / max(steps - 1, 1):.3g}",
            _DASHES[k % len(_DASHES)],
            ".1%",
        )
        for k in range(steps)
    ]
    return figure_of(traces, xaxis=axis_of("update"), yaxis=axis_of(None, tickformat=".1~%", rangemode="tozero"))


def held_out_curve(rows: Sequence[dict[str, Any]], best_update: int | None) -> Figure:
    """Accepted length of the walk over held-out documents as training went on; the update that was kept is marked."""
    rows = [r for r in rows if r["walk"]["mean_accepted_length"] is not None]
    trace = _estimates("", [r["walk"] for r in rows], [r["update"] for r in rows], "update %{x}")
    trace["marker"] |= {
        "size": [15 if r["update"] == best_update else 7 for r in rows],
        "opacity": 1,
        "line": {"width": 0},
        "color": ["--own" if r["update"] == best_update else "--head" for r in rows],
        "symbol": ["star" if r["update"] == best_update else "circle" for r in rows],
    }
    return figure_of([trace], xaxis=axis_of("update"), yaxis=axis_of(None), showlegend=False)


def speed_bars(series: dict[str, Bars]) -> Figure:
    """Generated tokens a second by batch size; `series`: by name."""
    sizes = sorted({b for bars in series.values() for b in bars.values})
    traces = [
        {
            "type": "bar",
            "name": label_text(name),
            "x": [str(b) for b in sizes],
            "y": [bars.values.get(b) for b in sizes],
            "marker": {"color": bars.colour, "pattern": hatching(bars.hatch)},
            "texttemplate": "%{y:,.0f}",
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": f"{label_text(name)}, batch %{{x}}: %{{y:,.1f}} tokens/s<extra></extra>",
        }
        for name, bars in series.items()
    ]
    return figure_of(
        traces,
        height=280 + LEGEND_ROW * len(series),
        uniformtext={"mode": "hide", "minsize": 9},
        barmode="group",
        bargap=0.25,
        xaxis=axis_of("batch size", type="category"),
        yaxis=axis_of("tokens a second", rangemode="tozero"),
    )


def measurement_symbol(name: str) -> str:
    return _SYMBOLS[name]


def method_colour(name: str) -> str:
    return _COLOURS.get(name, "--other")


def method_hatch(name: str) -> str:
    return _HATCHES.get(name, "")


def thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th row and the last one, so that a long training keeps the page small."""
    step = max(1, math.ceil(len(rows) / _CURVE_POINTS))
    kept = list(rows[::step])
    return kept if not rows or kept[-1] is rows[-1] else [*kept, rows[-1]]


def _curve(name: str, xs: list[int], ys: list[float | None], colour: str, dash: str, form: str) -> Figure:
    return {
        "type": "scatter",
        "name": name,
        "x": xs,
        "y": ys,
        "mode": "lines",
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": f"update %{{x}}, {name} %{{y:{form}}}<extra></extra>",
    }


def _estimates(name: str, stats: Sequence[dict[str, Any]], xs: list[int], hover: str) -> Figure:
    """A line of accepted lengths with their intervals."""
    values = [s["mean_accepted_length"] for s in stats]
    intervals = [s.get("mean_accepted_length_ci95") for s in stats]
    return {
        "type": "scatter",
        "name": name,
        "x": xs,
        "y": values,
        "mode": "lines+markers",
        "line": {"color": "--head", "width": 2},
        "marker": {"color": "--head", "size": 8},
        "error_y": whiskers(values, intervals, "--head"),
        "text": [hover_interval(ci) for ci in intervals],
        "hovertemplate": f"{hover}: %{{y:.3f}}%{{text}}<extra></extra>",
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; a diverged loss leaves a gap in its curve."""
    return value if math.isfinite(value) else None
