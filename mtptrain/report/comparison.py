"""Heads of one run side by side: comparison.json, a plain record made of their report.json files.

schema      1
run         name of the run's folder
target      what the heads draft for, as the first report has it
comparable  whether all heads draft for one target and were measured on the same documents
heads       {label: {...}}, the longest accepted length first, by label where they are not comparable
  kind, k, target                       `target`: hash of its weights, or where the report has none its path
  measured_by                           the strongest measurement of the head, whose figures follow
  documents, drafts, mean_accepted_length, mean_accepted_length_ci95, tokens_per_target_step, tokens_per_target_step_ci95,
  conditional_accept_rate, by_source    as in report.json; {source: {"documents", "mean_accepted_length", ...}}
  walk                                  "documents", "generated_tokens" and accepted length over all held-out documents
  parameters, parameters_per_drafted_token, draft_vocabulary, captures, store_bytes_per_token, training_seconds, supervised_rows
  speed                                 [{"batch_size", "tokens_per_second", "against_none"}]: the ratio to the same engine's run without
                                        speculation in the same report; empty where no engine was timed
  gate_open, gate_reasons               null where no gate was set
  exports                               {folder: how far it is proven}
baselines   {"none", "ngram", ...: {the same figures, where measured, and "speed"}} of one report, which `baselines_of` names
notes       why figures of these heads may not be compared
left_out    one line for each file that could not be used

What a report does not have is null.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtptrain.errors import UserError
from mtptrain.files import read_json
from mtptrain.report.schema import REPORT, SCHEMA, strongest
from mtptrain.report.wording import count, name_of

COMPARISON = "comparison.json"
_VERSION = 1
_MAKE_IT = "run python -m mtptrain.validate (with that head's arguments)"
_ACCEPTANCE = ("documents", "mean_accepted_length", "mean_accepted_length_ci95", "tokens_per_target_step", "tokens_per_target_step_ci95")
_COST = ("parameters", "parameters_per_drafted_token", "draft_vocabulary", "captures", "store_bytes_per_token")


def compare_run(folder: Path) -> dict[str, Any]:
    """The comparison of all heads of the run in `folder` whose reports can be read."""
    reports: dict[str, dict[str, Any]] = {}
    exports: dict[str, dict[str, str]] = {}
    left_out: list[str] = []
    for path in sorted(head / "report" / REPORT for head in folder.glob("heads/*") if head.is_dir()):
        if not path.exists():
            left_out.append(f"{path.parents[1]} has no report and is left out; {_MAKE_IT}")
            continue
        label = path.parents[1].name
        try:
            reports[label] = _read_report(path)
        except UserError as error:
            left_out.append(str(error))
            continue
        exports[label], trouble = _exports(path.parents[1])
        left_out += trouble
    return comparison(folder.name, reports, exports, left_out)


def comparison(run: str, reports: dict[str, dict[str, Any]], exports: dict[str, dict[str, str]], left_out: list[str]) -> dict[str, Any]:
    """The whole record of `reports`, by head label."""
    found = {label: head_record(report) | {"exports": exports.get(label, {})} for label, report in reports.items()}
    same = comparable(found)
    heads = {label: found[label] for label in sorted(found, key=lambda label: (-(found[label]["mean_accepted_length"] or 0) * same, label))}
    with_others = next((label for label in heads if _baselines(reports[label])), None)
    return {
        "schema": _VERSION,
        "run": run,
        "target": next((reports[label].get("target") for label in heads), None),
        "comparable": same,
        "heads": heads,
        "baselines": {} if with_others is None else _baselines(reports[with_others]),
        "baselines_of": with_others,
        "notes": notes(heads),
        "left_out": left_out,
    }


def head_record(report: dict[str, Any]) -> dict[str, Any]:
    """What a comparison says of one head. Raises KeyError or TypeError where the report lacks the walk or what it is of."""
    walk = report["walk"]["overall"]
    name, measured = strongest(report)
    head, training, gate = report["head"], report.get("training") or {}, report.get("gate") or {}
    target = report.get("target") or {}
    return (
        {"kind": head["kind"], "k": report["k"], "measured_by": name}
        | _acceptance(measured)
        | {"walk": {key: walk[key] for key in (*_ACCEPTANCE[:3], "generated_tokens")}}
        | {key: head.get(key) for key in _COST}
        | {
            "target": target.get("weights") or target.get("path"),
            "training_seconds": training.get("seconds"),
            "supervised_rows": training.get("supervised_rows"),
            "speed": _speed(report, "head"),
            "gate_open": gate.get("open"),
            "gate_reasons": gate.get("reasons"),
        }
    )


def comparable(heads: dict[str, dict[str, Any]]) -> bool:
    """Whether the heads draft for one target and were measured on the same documents."""
    seen = [(head["target"], _documents(head)) for head in heads.values()]
    return all(one == seen[0] for one in seen)


def notes(heads: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each thing that keeps the heads' figures from being compared."""
    found = [
        _differing(
            heads, lambda h: h["target"], lambda h: str(h["target"]), "The heads draft for different targets and cannot be compared"
        ),
        _differing(
            heads,
            _documents,
            lambda h: f"{count(h['documents'])} of {count(h['walk']['documents'])} with {count(h['walk']['generated_tokens'])} tokens",
            "The heads were measured on different documents and cannot be compared",
        ),
        _differing(
            heads,
            lambda h: h["k"],
            lambda h: f"K = {h['k']}",
            "The heads drafted different numbers of tokens, and longer drafts accept more",
        ),
        _differing(heads, lambda h: h["measured_by"], lambda h: name_of(h["measured_by"]), "The heads were measured in different ways"),
    ]
    return [note for note in found if note]


def _documents(head: dict[str, Any]) -> tuple[Any, ...]:
    """What tells documents apart: how many of each source, and the tokens of the answers that the walk went over, whoever drafts."""
    walk, sources = head["walk"], head["by_source"]
    return walk["documents"], walk["generated_tokens"], {source: of["documents"] for source, of in sources.items()}


def _differing(
    heads: dict[str, dict[str, Any]], key: Callable[[dict[str, Any]], Any], words: Callable[[dict[str, Any]], str], sentence: str
) -> str | None:
    """`sentence` and which heads have what, if they don't all have the same."""
    groups: list[tuple[Any, str, list[str]]] = []
    for label, head in heads.items():
        group = next((g for g in groups if g[0] == key(head)), None)
        if group is None:
            groups.append(group := (key(head), words(head), []))
        group[2].append(label)
    if len(groups) < 2:
        return None
    said = [f"{what} ({', '.join(labels)})" for _, what, labels in groups]
    return f"{sentence}: {'; '.join(said)}."


def _acceptance(measurement: dict[str, Any]) -> dict[str, Any]:
    stats = measurement["overall"]
    return {key: stats[key] for key in (*_ACCEPTANCE, "drafts", "conditional_accept_rate")} | {
        "by_source": {source: {key: of[key] for key in _ACCEPTANCE} for source, of in measurement["by_source"].items()}
    }


def _speed(report: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """Of one method by batch size, with its ratio to no speculation."""
    rows = (report.get("speed") or {}).get("rows") or []
    plain = {row["batch_size"]: row["tokens_per_second"] for row in rows if row["method"] == "none"}
    return [
        {
            "batch_size": row["batch_size"],
            "tokens_per_second": row["tokens_per_second"],
            "against_none": row["tokens_per_second"] / plain[row["batch_size"]] if row["batch_size"] in plain else None,
        }
        for row in sorted(rows, key=lambda row: row["batch_size"])
        if row["method"] == method
    ]


def _baselines(report: dict[str, Any]) -> dict[str, Any]:
    """What a report measured beside the head: no speculation by its speed alone, other methods by their acceptance as well."""
    none = _speed(report, "none")
    found: dict[str, Any] = {"none": {"speed": none}} if none else {}
    for name, measurement in (report.get("baselines") or {}).items():
        found[name] = {"k": measurement["k"]} | _acceptance(measurement) | {"speed": _speed(report, name)}
    return found


def _read_report(path: Path) -> dict[str, Any]:
    """A report that a comparison can be made of. UserError in one line where it is another schema's or damaged."""
    report = read_json(path)
    again = f"delete {path.parent} and {_MAKE_IT}"
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}, not {SCHEMA}, and is left out; {again}")
    try:
        head_record(report)
        _baselines(report)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}) and is left out; {again}") from error
    return report


def _exports(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Proof of each exported folder of a head, and a line for each that does not say it."""
    proofs, trouble = {}, []
    for path in sorted(folder.glob("export/[!.]*/mtptrain.json")):
        try:
            about = read_json(path)
        except UserError as error:
            trouble.append(str(error))
            continue
        proof = about.get("proof") if isinstance(about, dict) else None
        if isinstance(proof, str):
            proofs[path.parent.name] = proof
        else:
            trouble.append(
                f"{path} is damaged (no `proof` in it); delete it and run python -m mtptrain.export (with that head's arguments)"
            )
    return proofs, trouble
