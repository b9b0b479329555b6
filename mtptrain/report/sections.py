"""Training, speed and certificate in report.html: each None where the report has nothing to show in it."""

from collections.abc import Iterable
from typing import Any

from mtptrain.report import figures
from mtptrain.report.views import Panel, Section, Table
from mtptrain.report.wording import SPACE, count, draft_length, duration, interval, name_of, number, numbered, percent


def training(report: dict[str, Any], log_rows: Iterable[dict[str, Any]]) -> Section | None:
    rows = list(log_rows)
    steps, walks = [r for r in rows if "loss" in r], [r for r in rows if r.get("walk")]
    facts = report.get("training") or {}
    panels = []
    if walks:
        best = facts.get("best_update")
        panels.append(Panel(title="Accepted length, held-out walk", figure=figures.held_out_curve(walks, best)))
    if steps:
        panels.append(Panel(title="Loss", figure=figures.loss_curve(steps)))
    if matched := [r for r in steps if r.get("match")]:
        panels.append(Panel(title="Match with the target, by step", figure=figures.match_curves(matched)))
    if not panels:
        return None
    said = [
        f"{count(facts['updates'])} updates" if facts.get("updates") is not None else "",
        f"{count(facts['tokens'])} tokens" if facts.get("tokens") is not None else "",
        f"{duration(facts['seconds'])}" if facts.get("seconds") is not None else "",
    ]
    if walks:
        panels.append(Panel(title="Held-out walk in numbers", table=_walk_table(walks, facts.get("best_update")), wide=True))
    lede = ", ".join(filter(None, said)) + "." if any(said) else ""
    if walks and facts.get("best_update") is not None:
        lede += " The star is the update that was kept."
    lede += _stored(report.get("codec_error"))
    return Section("training", "Training", lede.strip(), panels, columns=3)


def _stored(error: dict[str, Any] | None) -> str:
    """What the store's codec did to what was trained on; nothing where states are kept whole."""
    if not error or not any(error["relative_error"].values()):
        return ""
    worst = max(error["relative_error"].values())
    return (
        f" States were read from {', '.join(sorted(set(error['codec'].values())))}: off by {worst:.2%} at most (mean of a capture), the "
        f"teacher by {error['teacher_kl']:.1g} nats, with another first choice in {error['first_choice_changed']:.1%} of rows."
    )


def _walk_table(walks: list[dict[str, Any]], best_update: int | None) -> Table:
    kept = figures.thinned(walks)
    rows = [
        [
            count(r["update"]),
            number(r["walk"].get("mean_accepted_length")),
            interval(r["walk"].get("mean_accepted_length_ci95")),
            *(percent(x) for x in r["walk"].get("conditional_accept_rate") or []),
        ]
        for r in kept
    ]
    ks = max(len(r) for r in rows) - 3
    columns = ["update", "accepted length", "95 % interval", *(f"{d}, conditional" for d in numbered("depth", ks))]
    return Table(columns, rows, [i for i, r in enumerate(kept) if r["update"] == best_update], fold_above=6)


def speed(report: dict[str, Any]) -> Section | None:
    found = report.get("speed") or {}
    rows = sorted(found.get("rows") or [], key=lambda r: r["batch_size"])
    if not rows:
        return None
    series: dict[str, figures.Bars] = {}
    for row in rows:
        look = figures.Bars(values={}, colour=figures.method_colour(row["method"]), hatch=figures.method_hatch(row["method"]))
        series.setdefault(_run_name(row), look).values[row["batch_size"]] = row["tokens_per_second"]
    plain = {r["batch_size"]: r["tokens_per_second"] for r in rows if r["method"] == "none"}
    cells = [
        [
            _run_name(r),
            count(r["batch_size"]),
            count(r.get("requests")),
            number(r["tokens_per_second"], 1),
            f"{number(r['tokens_per_second'] / plain[r['batch_size']], 2)}{SPACE}×" if r["batch_size"] in plain else "",
            count(r.get("tokens")),
            number(r.get("seconds"), 2),
        ]
        for r in rows
    ]
    lede = "Generated tokens a second in the serving engine, over all requests of a batch"
    if found.get("tokens"):
        lede += f", {count(found['tokens'])} tokens each"
    table = Table(["", "batch", "requests", "tokens/s", "against none", "tokens", "seconds"], cells)
    panel = Panel(title="Tokens a second", figure=figures.speed_bars(series), table=table, wide=True)
    return Section("speed", "Speed", f"{lede}.", [panel])


def _run_name(row: dict[str, Any]) -> str:
    drafts = row["method"] != "none" and row.get("k")
    return name_of(row["method"]) + (f", {draft_length(row['k'])}" if drafts else "")


def certificate(report: dict[str, Any]) -> Section | None:
    found, expected = report.get("certificate"), report.get("expected_at_temperature_1")
    panels = []
    if found:
        note = f"A tie counts as agreement: {found['tie']}." if found.get("tie") else ""
        panels.append(Panel(title="Agreement, token for token", note=note, table=_agreement(found, report.get("rendering"))))
        if found.get("output_divergences"):
            panels.append(Panel(title="Outputs that differ", table=_divergences(found["output_divergences"])))
        if found.get("differing_drafts"):
            panels.append(Panel(title="Drafts that differ by more than a tie", table=_differing_drafts(found["differing_drafts"])))
    if expected:
        panels.append(_expected(expected))
    if not panels:
        return None
    return Section("certificate", "Certificate", "Whether the measurements saw the same head, and what sampling would accept.", panels)


def _agreement(found: dict[str, Any], rendering: dict[str, Any] | None) -> Table:
    between = " and ".join(name_of(n) for n in found.get("between") or [])
    drafted = [
        f"drafted tokens, {between}" if between else "drafted tokens",
        percent(found.get("drafted_token_agreement"), 2),
        percent(found.get("raw_agreement"), 2),
        count(found.get("drafted_tokens_compared")),
        count(found.get("drafted_token_ties")),
    ]
    outputs = [
        "output, with the target's own",
        percent(found.get("output_agreement"), 2),
        percent(found.get("raw_output_agreement"), 2),
        count(found.get("output_tokens_compared")),
        "",
    ]
    rows = [drafted, outputs]
    if found.get("target_agreement") is not None:
        served = [percent(found["target_agreement"], 2), percent(found.get("raw_target_agreement"), 2)]
        rows.append(["the engine's target, with transformers'", *served, count(found.get("target_tokens_compared")), ""])
    if rendering:
        share = percent(rendering["equal"] / rendering["dialogues"], 2)
        rows.append(["the engine's prompts, with the tokenizer's", share, share, count(rendering["dialogues"]), ""])
    return Table(["", "agree", "not counting ties", "compared", "ties"], rows)


def _divergences(divergences: list[dict[str, Any]]) -> Table:
    rows = [
        [str(d.get("id")), count(d.get("token")), "a tie" if d.get("tie") else "not a tie", number(d.get("margin"), 4)] for d in divergences
    ]
    return Table(["document", "first differing token", "cause", "margin"], rows, words=[2])


def _differing_drafts(differing: list[dict[str, Any]]) -> Table:
    rows = [[str(d.get("id")), count(d.get("row")), count(d.get("depth")), count(d.get("token")), _margin(d)] for d in differing]
    return Table(["document", "drafted from row", "first differing depth", "drafted token id", "below the best logit"], rows)


def _margin(found: dict[str, Any]) -> str:
    return "no logit" if found.get("margin") is None else f"{found['margin']:.2g}"


def _expected(expected: dict[str, Any]) -> Panel:
    kinds = {"greedy_draft": "greedy draft", "sampled_draft": "sampled draft"}
    found = {label: expected[key] for key, label in kinds.items() if expected.get(key)}
    steps = max((len(e.get("accept_rate_by_step") or []) for e in found.values()), default=0)
    rows = []
    for label, e in found.items():
        rates = [percent(r) for r in e.get("accept_rate_by_step") or []]
        rows.append([label, number(e.get("expected_accepted_length")), *rates, *[""] * (steps - len(rates))])
    n = expected.get("rows")
    return Panel(
        title="Expected at temperature 1",
        note=f"From the full distributions of head and target{f' on {count(n)} rows' if n else ''}.",
        table=Table(["", "accepted length", *numbered("step", steps)], rows),
    )
