"""comparison.html: the heads of a run side by side, as self-contained as report.html (report/page.py) and made of the same parts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtptrain.files import write_text
from mtptrain.report.comparison_figures import Series, against, grouped_forest, head_look
from mtptrain.report.figures import Bars, method_colour, method_hatch, speed_bars
from mtptrain.report.page import rendered
from mtptrain.report.views import Panel, Section, Table
from mtptrain.report.wording import MISSING, SPACE, count, draft_length, duration, interval, name_of, number, numbered, percent

COMPARISON_PAGE = "comparison.html"
_ALL = "all documents"


def write_comparison_page(path: Path, record: dict[str, Any]) -> None:
    """`record`: what comparison.json holds."""
    write_text(path, comparison_page(record))


def comparison_page(record: dict[str, Any]) -> str:
    heads, target = record["heads"], record["target"] or {}
    ks = {head["k"] for head in heads.values()}
    ways = {head["measured_by"] for head in heads.values()}
    head = {
        "run": record["run"],
        "target": str(target.get("path") or "an unnamed target"),
        "facts": [
            str(target.get("model_type") or ""),
            f"{len(heads)} heads",
            f"drafts of {draft_length(ks.pop())} tokens" if len(ks) == 1 else "",
            name_of(ways.pop()) if len(ways) == 1 else "",
        ],
    }
    parts = (acceptance(record), depth(record), cost(record), speed(record), gates(record))
    return rendered("comparison.html.jinja", head, [part for part in parts if part])


def acceptance(record: dict[str, Any]) -> Section:
    """All heads and n-gram lookup, over all documents and by source; with everything that speaks against comparing them."""
    heads, others = record["heads"], _drafting(record)
    rows = [[label, h["kind"], str(h["k"]), name_of(h["measured_by"]), *_lengths(h), *_of_walk(h["walk"])] for label, h in heads.items()]
    rows += [[name_of(name), "", str(b["k"]), name_of("engine"), *_lengths(b), "", ""] for name, b in others.items()]
    columns = ["head", "kind", "K", "measured by", "accepted length", "95 % interval", "tokens per target step", "documents"]
    columns += ["offline walk", "its documents"]
    sources = sorted({source for one in (*heads.values(), *others.values()) for source in one["by_source"]})
    everyone = [*heads.items(), *((name_of(name), b) for name, b in others.items())]
    by_source = [
        [source, label, *_lengths(one["by_source"][source])] for source in sources for label, one in everyone if source in one["by_source"]
    ]
    panels = [
        Panel(
            title="Mean accepted length",
            note="Lines are 95 % bootstrap intervals over documents; the dotted line is decoding without speculation.",
            figure=grouped_forest([_ALL, *sources], _by_group(record, sources), "tokens a draft and its verification yield"),
            table=Table(columns, rows, words=[1, 3]),
            wide=True,
        ),
        Panel(
            title="By source",
            note="A source with a single document has no interval.",
            table=Table(
                ["source", "head", "accepted length", "95 % interval", "tokens per target step", "documents"], by_source, words=[1]
            ),
            wide=True,
        ),
    ]
    order = "the longest accepted length first" if record["comparable"] else "in order of their names, because they can't be compared"
    lede = f"Every head by the strongest measurement of its report, {order}."
    return Section("acceptance", "Acceptance", lede, panels, warnings=[*record["notes"], *_beaten(record), *record["left_out"]])


def depth(record: dict[str, Any]) -> Section:
    """Conditional acceptance."""
    everyone = [*record["heads"].items(), *((name_of(name), b) for name, b in _drafting(record).items())]
    ks = max((len(one["conditional_accept_rate"]) for _, one in everyone), default=0)
    rows = [[label, *_filled([percent(r) for r in one["conditional_accept_rate"]], ks)] for label, one in everyone]
    panel = Panel(
        title="Accepted, of the drafts that reached the depth",
        note="A token counts only if all before it were accepted.",
        table=Table(["head", *numbered("depth", ks)], rows),
    )
    return Section("depth", "By depth", "", [panel])


def cost(record: dict[str, Any]) -> Section:
    """What the heads take in training and drafting, and what they yield for it."""
    heads = record["heads"]
    rows = [
        [
            label,
            count(h["parameters"]),
            count(h["parameters_per_drafted_token"]),
            count(h["draft_vocabulary"]),
            ", ".join(h["captures"]) if h["captures"] is not None else MISSING,
            count(h["store_bytes_per_token"]),
            count(h["supervised_rows"]),
            duration(h["training_seconds"]),
        ]
        for label, h in heads.items()
    ]
    columns = [
        "head",
        "parameters",
        "parameters a drafted token takes",
        "draft vocabulary",
        "captures",
        "bytes a token in the store",
    ]
    columns += ["supervised rows", "training"]
    panels = [
        panel
        for panel in (
            _against(record, "parameters_per_drafted_token", "Accepted length and work of a draft", "parameters a drafted token takes"),
            _against(record, "training_seconds", "Accepted length and training", "seconds of training"),
        )
        if panel
    ]
    panels.append(Panel(title="In numbers", table=Table(columns, rows, words=[4]), wide=True))
    return Section("cost", "What it takes", "A dearer draft must accept more to be worth its time.", panels, columns=2)


def speed(record: dict[str, Any]) -> Section | None:
    """Tokens a second in the engine, of each head against no speculation in the same report."""
    everyone = [(label, h["speed"], head_look(i)) for i, (label, h) in enumerate(record["heads"].items())]
    others = record["baselines"]
    timed = [(label, rows, Bars(values={}, colour=colour, hatch=hatch)) for label, rows, (colour, _, hatch) in everyone if rows]
    timed += [
        (name_of(name), b["speed"], Bars(values={}, colour=method_colour(name), hatch=method_hatch(name)))
        for name, b in others.items()
        if b["speed"]
    ]
    if not timed:
        return None
    cells = []
    for label, rows, bars in timed:
        for row in rows:
            bars.values[row["batch_size"]] = row["tokens_per_second"]
            ratio = "" if row["against_none"] is None else f"{number(row['against_none'], 2)}{SPACE}×"
            cells.append([label, count(row["batch_size"]), number(row["tokens_per_second"], 1), ratio])
    panel = Panel(
        title="Tokens a second",
        note=(
            "Each head against no speculation as it was timed beside that head. Other methods are shown once, as timed beside "
            f"{record['baselines_of']}."
        ),
        figure=speed_bars({label: bars for label, _, bars in timed}),
        table=Table(["", "batch", "tokens/s", "against none"], cells),
        wide=True,
    )
    return Section("speed", "Speed", "Generated tokens a second in the serving engine, over all requests of a batch.", [panel])


def gates(record: dict[str, Any]) -> Section:
    """Whether each head may be exported, and how far its exports are proven."""
    rows = []
    for label, h in record["heads"].items():
        gate = {True: "open", False: f"shut: {'; '.join(h['gate_reasons'] or [])}", None: MISSING}[h["gate_open"]]
        exports = ", ".join(f"{folder} ({proof})" for folder, proof in h["exports"].items())
        rows.append([label, gate, exports or MISSING])
    panel = Panel(title="Gate and proof", table=Table(["head", "gate", "exported folders, and what has proven them"], rows, words=[1, 2]))
    return Section("exports", "Exports", "", [panel])


def _drafting(record: dict[str, Any]) -> dict[str, Any]:
    """Baselines that draft and of which a draft was measured."""
    return {name: b for name, b in record["baselines"].items() if b.get("mean_accepted_length") is not None}


def _beaten(record: dict[str, Any]) -> list[str]:
    """A sentence for each baseline that yields more than some of the heads."""
    said = []
    for name, b in _drafting(record).items():
        yields = b["tokens_per_target_step"]
        worse = [
            label
            for label, h in record["heads"].items()
            if h["tokens_per_target_step"] is not None and h["tokens_per_target_step"] < yields
        ]
        if worse:
            said.append(f"{name_of(name).capitalize()} yields more than {', '.join(worse)}: {number(yields)} tokens per target step.")
    return said


def _by_group(record: dict[str, Any], sources: list[str]) -> list[Series]:
    """Of each head and drafting baseline, over all documents (place 0) and the sources."""
    looks = [(label, h, *head_look(i)[:2]) for i, (label, h) in enumerate(record["heads"].items())]
    looks += [(name_of(name), b, method_colour(name), "circle-open") for name, b in _drafting(record).items()]
    return [_series(label, [one, *(one["by_source"].get(s, {}) for s in sources)], colour, symbol) for label, one, colour, symbol in looks]


def _series(label: str, stats: Iterable[dict[str, Any]], colour: str, symbol: str) -> Series:
    measured = [(place, s) for place, s in enumerate(stats) if s.get("mean_accepted_length") is not None]
    return Series(
        label=label,
        places=[place for place, _ in measured],
        values=[s["mean_accepted_length"] for _, s in measured],
        intervals=[s["mean_accepted_length_ci95"] for _, s in measured],
        colour=colour,
        symbol=symbol,
    )


def _against(record: dict[str, Any], key: str, title: str, axis: str) -> Panel | None:
    """Accepted length over one of the costs; None where no head has both."""
    series = []
    for i, (label, head) in enumerate(record["heads"].items()):
        if head[key] is not None and head["mean_accepted_length"] is not None:
            colour, symbol, _ = head_look(i)
            one = _series(label, [head], colour, symbol)
            one.places = [head[key]]
            series.append(one)
    ngram = _drafting(record).get("ngram")
    level = (name_of("ngram"), ngram["mean_accepted_length"]) if ngram else None
    return Panel(title=title, figure=against(series, axis, level)) if series else None


def _lengths(one: dict[str, Any]) -> list[str]:
    return [
        number(one["mean_accepted_length"]),
        interval(one["mean_accepted_length_ci95"]),
        number(one["tokens_per_target_step"]),
        count(one["documents"]),
    ]


def _of_walk(walk: dict[str, Any]) -> list[str]:
    return [number(walk["mean_accepted_length"]), count(walk["documents"])]


def _filled(cells: list[str], width: int) -> list[str]:
    return cells + [""] * (width - len(cells))
