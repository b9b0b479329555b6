"""What the charts of report.html and comparison.html are made of: plotly figures in plain JSON.

Colours are names of page.css's custom properties, resolved in the browser so that a chart follows the light or dark scheme:
"--head" is one of them, "--line 0.5" a point half way from --line-lo to --line-hi.
"""

import html
from collections.abc import Sequence
from typing import Any

from mtptrain.visible import visible

Figure = dict[str, Any]

_LABEL_CHARACTERS = 28
_FONT_SIZE = 12.5
LEGEND_ROW = 20
"""Pixels that each entry of a legend may take from its chart in a narrow window."""
NO_SPECULATION: Figure = {
    "type": "line",
    "x0": 1,
    "x1": 1,
    "yref": "paper",
    "y0": 0,
    "y1": 1,
    "line": {"color": "--muted", "dash": "dot", "width": 1},
}


def label_text(text: str) -> str:
    """For plotly, which reads some HTML in labels. Long names lose their middle; the table beside a chart has them whole."""
    text = visible(text).replace("\n", "␊")
    if len(text) > _LABEL_CHARACTERS:
        kept = _LABEL_CHARACTERS // 2
        text = f"{text[: kept - 1]}…{text[-kept:]}"
    return html.escape(text, quote=False)


def room(ends: Sequence[float], share: float) -> list[float]:
    """An axis' range with a margin on both sides."""
    margin = share * (max(ends) - min(ends)) or 0.1
    return [min(ends) - margin, max(ends) + margin]


def whiskers(values: Sequence[float], intervals: Sequence[Sequence[float] | None], colour: str) -> Figure:
    return {
        "type": "data",
        "symmetric": False,
        "array": [ci[1] - v if ci else 0 for v, ci in zip(values, intervals, strict=True)],
        "arrayminus": [v - ci[0] if ci else 0 for v, ci in zip(values, intervals, strict=True)],
        "color": colour,
        "thickness": 1.5,
        "width": 5,
    }


def hover_interval(ci: Sequence[float] | None) -> str:
    return f" (95 % {ci[0]:.3f} – {ci[1]:.3f})" if ci else ""


def hatching(shape: str) -> Figure:
    """Bars told apart by more than their colour."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "--panel", "solidity": 0.2, "size": 7}


def axis_of(title: str | None, **more: Any) -> Figure:
    axis: Figure = {"gridcolor": "--rule", "linecolor": "--rule", "zerolinecolor": "--rule", "automargin": True, "fixedrange": True}
    return axis | ({"title": {"text": title, "standoff": 10, "font": {"size": _FONT_SIZE}}} if title else {}) | more


def figure_of(traces: list[Figure], height: int = 300, **layout: Any) -> Figure:
    base: Figure = {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "--ink", "size": _FONT_SIZE},
        "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--muted", "font": {"color": "--ink"}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "dragmode": False,
    }
    return {"data": traces, "layout": base | layout}
