"""report.html: report.json and the training log as one self-contained page.

It loads nothing, from the network or beside it: plotly.js, style and script are inside, and its content security policy allows no
other script, so text from prompts cannot run even if an escape were missed. The same input gives the same bytes.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from mtptrain.files import write_text
from mtptrain.report import acceptance, sections
from mtptrain.report.samples import line, lines, samples
from mtptrain.report.views import Panel, Section, Table, strongest
from mtptrain.report.wording import PROOFS, SPACE, count, fact, interval, name_of, number, percent
from mtptrain.visible import visible

PAGE = "report.html"
_ASSETS = Path(__file__).parent / "assets"


def write_report_page(path: Path, report: dict[str, Any], log_rows: Iterable[dict[str, Any]]) -> None:
    """`report`: what report.json holds; `log_rows`: rows of train/log.jsonl."""
    write_text(path, report_page(report, log_rows))


def report_page(report: dict[str, Any], log_rows: Iterable[dict[str, Any]]) -> str:
    parts = (
        acceptance.measurements(report),
        acceptance.depth(report),
        sections.training(report, log_rows),
        samples(report),
        sections.speed(report),
        sections.certificate(report),
        serve(report),
        about(report),
    )
    return rendered("page.html.jinja", headline(report), [part for part in parts if part])


def rendered(template: str, head: Mapping[str, Any], parts: Sequence[Section | Mapping[str, Any]]) -> str:
    """A page of ours: `head` for the template's header, then the parts."""
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"lines": lines, "line": line, "visible": visible}
    scripts = [get_plotlyjs(), _asset("page.js")]
    return environment.get_template(template).render(
        head=head,
        parts=parts,
        style=Markup(_asset("page.css")),
        scripts=[Markup(s) for s in scripts],
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(map(_script_hash, scripts))}; base-uri 'none'",
    )


def headline(report: dict[str, Any]) -> dict[str, Any]:
    """What a reader must know before anything else."""
    head, target, k = report.get("head") or {}, report.get("target") or {}, report.get("k")
    best = strongest(report)
    stats = best[1]["overall"] if best else {}
    ci = stats.get("mean_accepted_length_ci95")
    measured_by = [
        f"95 % interval {interval(ci)}" if ci else "no interval: too few documents",
        name_of(best[0]) if best else "",
        f"{count(stats.get('documents'))} held-out documents",
        f"{count(stats.get('drafts'))} drafts",
    ]
    return {
        "kind": str(head.get("kind") or "draft"),
        "target": str(target.get("path") or "an unnamed target"),
        "model_type": target.get("model_type"),
        "k": k,
        "length": number(stats.get("mean_accepted_length")),
        "measured_by": measured_by if best else ["no draft was measured"],
        "gate": _gate(report, stats),
        "proof": report.get("proof"),
        "proof_words": PROOFS.get(report.get("proof") or "", ""),
        "yields": _yields(stats.get("accept_rate_per_position") or []),
    }


def _gate(report: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any] | None:
    gate = report.get("gate")
    if not gate:
        return None
    if not gate.get("open"):
        return {"open": False, "reasons": gate.get("reasons") or ["no reason is recorded"]}
    reasons = []
    if gate.get("min_accepted_length") is not None:
        reasons.append(f"accepted length {number(stats.get('mean_accepted_length'))} reaches the {gate['min_accepted_length']:g} asked for")
    if (found := report.get("certificate")) and gate.get("max_disagreement") is not None:
        kinds = [("drafted tokens", "drafted_token_agreement"), ("outputs", "output_agreement")]
        shares = [f"{name} {percent(found[key], 2)}" for name, key in kinds if found.get(key) is not None]
        reasons.append(f"equal or tied: {', '.join(shares)}; {round(100 - 100 * gate['max_disagreement'], 6):g}{SPACE}% is asked for")
    return {"open": True, "reasons": reasons}


def _yields(rates: list[float | None]) -> list[dict[str, Any]]:
    """Shares of drafts that yield 1, 2, ... K + 1 tokens: what the target adds, and n accepted."""
    known = [r for r in rates if r is not None]
    if not known:
        return []
    shares = [a - b for a, b in pairwise([1.0, *known, 0.0])]
    return [{"tokens": n + 1, "share": share, "text": percent(share), "depth": n / len(known)} for n, share in enumerate(shares)]


def serve(report: dict[str, Any]) -> dict[str, Any] | None:
    return {"id": "serve", "title": "Serve it", "command": report["serve"]} if report.get("serve") else None


def about(report: dict[str, Any]) -> Section | None:
    """Versions, training facts and configuration: what it takes to make the head again."""
    titles = {"target": "Target", "head": "Head", "training": "Training", "versions": "Versions"}
    panels = [Panel(title=title, table=Table(["", ""], _facts(report[key]), words=[1])) for key, title in titles.items() if report.get(key)]
    return Section("about", "What was run", "", panels, columns=2) if panels else None


def _facts(record: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Leaves of a nested record, by dotted key."""
    rows = []
    for key, value in record.items():
        if isinstance(value, dict):
            rows += _facts(value, f"{prefix}{key}.")
        else:
            rows.append([prefix + key, fact(key, value)])
    return rows


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
