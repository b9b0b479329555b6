"""Acceptance in report.html: the measurements and baselines side by side, then by depth, draft length and source.

Every key of the report may be missing or null: what was not measured is left out or said to be so.
"""

from typing import Any

from mtptrain.report import figures
from mtptrain.report.figures import Estimate
from mtptrain.report.views import Panel, Section, Table, compared, overall, strongest
from mtptrain.report.wording import MEASUREMENTS, count, draft_length, interval, name_of, number, numbered, percent


def measurements(report: dict[str, Any]) -> Section | None:
    found, baselines = compared(report), {n: m for n, m in (report.get("baselines") or {}).items() if overall(m)}
    if not found and not baselines:
        return None
    entries = [(name_of(n), m) for n, m in found.items()]
    entries += [(name_of(n), m) for n, m in baselines.items()]
    estimates = [Estimate(label=name_of(n), symbol=figures.measurement_symbol(n), **_estimate(m)) for n, m in found.items()]
    estimates += [
        Estimate(label=name_of(n), colour=figures.method_colour(n), symbol="circle-open", **_estimate(m)) for n, m in baselines.items()
    ]
    rows = [[label, *_measured(m)] for label, m in entries]
    if (report.get("same_documents") or {}).get("walk") and overall(report.get("walk")):
        rows.append(["offline walk, all documents", *_measured(report["walk"])])
    rows += [[name_of(n), "not measured", *[""] * 5] for n in MEASUREMENTS if n not in found]
    columns = ["", "accepted length", "95 % interval", "tokens per target step", "K", "drafts", "documents"]
    shared = " on the same documents" if report.get("same_documents") else ""
    panel = Panel(
        title="Mean accepted length",
        note="Lines are 95 % bootstrap intervals over documents; the dotted line is decoding without speculation.",
        figure=figures.forest(estimates, "tokens a draft and its verification yield", show_values=True),
        table=Table(columns, rows),
        wide=True,
    )
    lede = f"The head, measured in up to three independent ways{shared}; they must agree."
    if baselines:
        lede += " Other methods are best compared by tokens per target step: all generated tokens over all steps of the target."
    return Section("measurements", "Acceptance", lede, [panel], warnings=_beaten(report))


def _beaten(report: dict[str, Any]) -> list[str]:
    """A sentence for each baseline that yields more than the head."""
    found = compared(report)
    name = next((n for n in ("engine", "reference", "walk") if n in found), None)
    own = found[name]["overall"].get("tokens_per_target_step") if name else None
    if own is None:
        return []
    better = {}
    for baseline, m in (report.get("baselines") or {}).items():
        stats = overall(m)
        if stats and (stats.get("tokens_per_target_step") or 0) > own:
            better[baseline] = stats["tokens_per_target_step"]
    return [
        f"{name_of(b).capitalize()} yields more than the head: {number(v)} tokens per target step, the head {number(own)}."
        for b, v in better.items()
    ]


def depth(report: dict[str, Any]) -> Section | None:
    found, best = compared(report), strongest(report)
    if best is None:
        return None
    stats = best[1]["overall"]
    rates, conditional = stats.get("accept_rate_per_position") or [], stats.get("conditional_accept_rate") or []
    panels = []
    if rates:
        rows = []
        for name, m in found.items():
            for kind, key in (("of all drafts", "accept_rate_per_position"), ("of drafts that reached it", "conditional_accept_rate")):
                rows.append([f"{name_of(name)}: {kind}", *(percent(r) for r in m["overall"].get(key) or [])])
        panels.append(
            Panel(
                title=f"By depth, {name_of(best[0])}",
                note="A token counts only if all before it were accepted. The hatched bar leaves out drafts that had failed earlier.",
                figure=figures.depth_bars(rates, conditional),
                table=Table(["", *numbered("depth", len(rates))], rows),
            )
        )
    panels += filter(None, (_by_k(report), _by_source(report), _by_context(report)))
    return Section(
        "depth",
        "By depth, length and source",
        "How deep drafts are accepted, how long they should be, on which text and how far into it.",
        panels,
    )


def _by_k(report: dict[str, Any]) -> Panel | None:
    by_k = {int(k): m["overall"] for k, m in (report.get("by_k") or {}).items() if overall(m)}
    by_k = dict(sorted(by_k.items()))
    if not by_k:
        return None
    rows = [
        [
            draft_length(k),
            number(s["mean_accepted_length"]),
            interval(s.get("mean_accepted_length_ci95")),
            number(s.get("tokens_per_target_step")),
            count(s.get("drafts")),
        ]
        for k, s in by_k.items()
    ]
    chosen = [i for i, k in enumerate(by_k) if k == report.get("k")]
    return Panel(
        title="By draft length, offline walk",
        note="Longer drafts accept more, but each drafted token costs time. The bold row is the length this report is about.",
        figure=figures.length_by_k(by_k),
        table=Table(["", "accepted length", "95 % interval", "tokens per target step", "drafts"], rows, chosen),
    )


def _by_source(report: dict[str, Any]) -> Panel | None:
    walk = report.get("walk") or {}
    sources = {n: s for n, s in (walk.get("by_source") or {}).items() if s.get("mean_accepted_length") is not None}
    if not sources:
        return None
    sources = dict(sorted(sources.items(), key=lambda item: (-item[1]["mean_accepted_length"], item[0])))
    ks = len(next(iter(sources.values())).get("accept_rate_per_position") or [])
    rows = [
        [
            name,
            count(s.get("documents")),
            number(s["mean_accepted_length"]),
            interval(s.get("mean_accepted_length_ci95")),
            *(percent(r) for r in s.get("accept_rate_per_position") or []),
        ]
        for name, s in sources.items()
    ]
    estimates = [Estimate(label=n, value=s["mean_accepted_length"], ci=s.get("mean_accepted_length_ci95")) for n, s in sources.items()]
    columns = ["source", "documents", "accepted length", "95 % interval", *numbered("depth", ks)]
    return Panel(
        title="By source, offline walk",
        note="All documents of the walk. A source with a single document has no interval.",
        figure=figures.forest(estimates, "accepted length", show_values=False),
        table=Table(columns, rows),
        wide=True,
    )


def _by_context(report: dict[str, Any]) -> Panel | None:
    contexts = {int(n): s for n, s in ((report.get("walk") or {}).get("by_context") or {}).items()}
    if not contexts:
        return None
    contexts = dict(sorted(contexts.items()))
    names = {n: f"{n:,} to {2 * n - 1:,}" if n else "fewer" for n in contexts}
    rows = [
        [names[n], count(s["documents"]), count(s["drafts"]), number(s["mean_accepted_length"]), interval(s["mean_accepted_length_ci95"])]
        for n, s in contexts.items()
    ]
    estimates = [Estimate(label=names[n], value=s["mean_accepted_length"], ci=s["mean_accepted_length_ci95"]) for n, s in contexts.items()]
    return Panel(
        title="By context, offline walk",
        note="Tokens before the draft: a head trained on short documents may lose acceptance far into long ones.",
        figure=figures.forest(estimates, "accepted length", show_values=False),
        table=Table(["tokens before", "documents", "drafts", "accepted length", "95 % interval"], rows),
        wide=True,
    )


def _estimate(measurement: dict[str, Any]) -> dict[str, Any]:
    stats = measurement["overall"]
    return {"value": stats["mean_accepted_length"], "ci": stats.get("mean_accepted_length_ci95")}


def _measured(measurement: dict[str, Any]) -> list[str]:
    stats = measurement["overall"]
    return [
        number(stats["mean_accepted_length"]),
        interval(stats.get("mean_accepted_length_ci95")),
        number(stats.get("tokens_per_target_step")),
        count(measurement.get("k")),
        count(stats.get("drafts")),
        count(stats.get("documents")),
    ]
