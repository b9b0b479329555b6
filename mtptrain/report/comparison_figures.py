"""Charts of comparison.html (report/plotting.py says of what kind)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtptrain.report.plotting import LEGEND_ROW, NO_SPECULATION, Figure, axis_of, figure_of, hover_interval, label_text, room, whiskers

_HEAD_COLOURS = ("--head", "--draft-model", "--other", "--extra")
_HEAD_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
_HEAD_HATCHES = ("", ".", "-", "|", "+")
"""Lengths without a common divisor, so that heads stay apart however many there are."""
_ROW, _AROUND_ROWS = 15, 80


@dataclass(slots=True, kw_only=True)
class Series:
    """Values of one head or baseline with their 95 % intervals, if they have any. `places`: a group's number, or a value on the x axis."""

    label: str
    places: Sequence[float]
    values: Sequence[float]
    intervals: Sequence[Sequence[float] | None]
    colour: str
    symbol: str


def head_look(number: int) -> tuple[str, str, str]:
    """(colour, symbol, hatch) of the n-th head of a comparison."""
    return (
        _HEAD_COLOURS[number % len(_HEAD_COLOURS)],
        _HEAD_SYMBOLS[number % len(_HEAD_SYMBOLS)],
        _HEAD_HATCHES[number % len(_HEAD_HATCHES)],
    )


def grouped_forest(groups: Sequence[str], series: Sequence[Series], axis: str) -> Figure:
    """`forest` of several series: the groups one below the other, in each of them a row for every series."""
    pitch = len(series) + 1
    traces = [
        _marks(one)
        | {
            "x": list(one.values),
            "y": [-place * pitch - row for place in one.places],
            "error_x": whiskers(one.values, one.intervals, one.colour),
            "text": [hover_interval(ci) for ci in one.intervals],
            "hovertemplate": f"{label_text(one.label)}: %{{x:.3f}}%{{text}}<extra></extra>",
        }
        for row, one in enumerate(series)
    ]
    borders = [1 - i * pitch for i in range(1, len(groups))]
    return figure_of(
        traces,
        height=_ROW * pitch * len(groups) + _AROUND_ROWS + LEGEND_ROW * len(series),
        xaxis=axis_of(axis, range=room([1.0, *_ends(series)], 0.06), zeroline=False),
        yaxis=axis_of(
            None,
            tickvals=[-i * pitch - (len(series) - 1) / 2 for i in range(len(groups))],
            ticktext=[label_text(group) for group in groups],
            range=[1 - len(groups) * pitch, 1],
            showgrid=False,
            zeroline=False,
        ),
        shapes=[NO_SPECULATION, *(_across(y, {"color": "--rule", "width": 1}) for y in borders)],
        showlegend=True,
    )


def against(series: Sequence[Series], axis: str, level: tuple[str, float] | None) -> Figure:
    """Accepted lengths over what they took, a mark for each series; `level`: name and value of what took nothing, a dashed line."""
    traces = [
        _marks(one)
        | {
            "x": list(one.places),
            "y": list(one.values),
            "error_y": whiskers(one.values, one.intervals, one.colour),
            "text": [hover_interval(ci) for ci in one.intervals],
            "hovertemplate": f"{label_text(one.label)}: %{{y:.3f}}%{{text}} at %{{x:,.4~s}}<extra></extra>",
        }
        for one in series
    ]
    lines: Figure = {}
    if level:
        name, value = level
        note = {"xref": "paper", "x": 0, "xanchor": "left", "y": value, "yanchor": "bottom", "showarrow": False}
        lines["shapes"] = [_across(value, {"color": "--ngram", "dash": "dash", "width": 1.5})]
        lines["annotations"] = [note | {"text": f"{label_text(name)} {value:.3f}", "font": {"color": "--ngram"}}]
    return figure_of(
        traces,
        height=300 + LEGEND_ROW * len(series),
        xaxis=axis_of(axis, rangemode="tozero"),
        yaxis=axis_of("accepted length", range=room([*_ends(series), *([level[1]] if level else [])], 0.1), zeroline=False),
        showlegend=True,
        **lines,
    )


def _ends(series: Sequence[Series]) -> list[float]:
    """All values and ends of intervals."""
    return [x for one in series for value, ci in zip(one.values, one.intervals, strict=True) for x in (value, *(ci or ()))]


def _across(y: float, line: Figure) -> Figure:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _marks(one: Series) -> Figure:
    return {
        "type": "scatter",
        "name": label_text(one.label),
        "mode": "markers",
        "marker": {"color": one.colour, "size": 9, "symbol": one.symbol, "line": {"width": 1.5, "color": one.colour}},
    }
