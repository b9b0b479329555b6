"""The validate stage: the trained head's acceptance by walk and reference decoder, whether they agree, and the gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtptrain import manifest
from mtptrain.config import Config, Measurement
from mtptrain.config_io import config_yaml
from mtptrain.decoding.compare import Agreement, compare_drafts, compare_outputs
from mtptrain.decoding.reference import Generation, greedy, speculate
from mtptrain.decoding.walk import DocumentWalk, Draft
from mtptrain.errors import UserError
from mtptrain.files import read_json, write_json, write_text
from mtptrain.heads.mtp import MtpHead
from mtptrain.report.measurement import measure
from mtptrain.report.schema import REPORT, SCHEMA, certificate, gate
from mtptrain.stages.context import (
    Context,
    as_plain,
    load_trained_head,
    open_context,
    open_store,
    store_fingerprint,
    trained_head_hash,
    versions,
)
from mtptrain.stages.train import spread
from mtptrain.stages.walk import expected_acceptance, walk_documents
from mtptrain.store.reader import Store
from mtptrain.target.ends import weights_hash
from mtptrain.target.model import load_model
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids

_TABLE_WIDTH = 120
"""A narrower table, as rich draws it into a log file, breaks every cell."""


@dataclass(slots=True)
class ReferenceRun:
    """The reference decoder on some held-out documents."""

    walks: list[DocumentWalk]
    drafts: Agreement
    outputs: Agreement
    divergences: list[dict[str, Any]]


def run(cfg: Config) -> None:
    """Measure, write report/report.json, print the table. Raises UserError when the gate is shut."""
    context = open_context(cfg)
    head, trained = load_trained_head(cfg, context)
    inputs = validate_inputs(cfg, context)
    if manifest.is_complete(cfg.report_dir, inputs, cfg.on_stale) and (cfg.report_dir / REPORT).exists():
        report = read_json(cfg.report_dir / REPORT)
    else:
        manifest.begin(cfg.report_dir, inputs)
        report = _measure(cfg, context, head, trained)
        write_text(cfg.report_dir / "config.yaml", config_yaml(cfg))
        write_json(cfg.report_dir / REPORT, report)
        manifest.finish(cfg.report_dir, inputs, {"gate": report["gate"]})
    print_table(report)
    print(f"validate: {cfg.report_dir / REPORT}", flush=True)
    if reasons := report["gate"]["reasons"]:
        raise UserError(f"the gate is shut, nothing is exported: {'; '.join(reasons)} (report: {cfg.report_dir / REPORT})")


def validate_inputs(cfg: Config, context: Context) -> dict[str, Any]:
    return {
        "head": trained_head_hash(cfg),
        "store": store_fingerprint(cfg),
        "target": weights_hash(context.folder),
        "validate": {k: [m.name for m in v] if k == "measure" else v for k, v in as_plain(cfg.validate).items()},
        "dtype": str(context.dtype).removeprefix("torch."),
    }


def _measure(cfg: Config, context: Context, head: MtpHead, trained: dict[str, Any]) -> dict[str, Any]:
    store, options = open_store(cfg), cfg.validate
    documents = spread(store.indices("held_out"), options.documents)
    ks = sorted({options.k, *options.k_table})
    walks, drafted = walk_documents(head, context, store, documents, ks)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "target": {"path": cfg.target.path, "weights": weights_hash(context.folder), "model_type": context.spec.model_type},
        "head": {"kind": cfg.head.kind.name, "config": as_plain(cfg.head), "parameters": trained["results"]["parameters"]},
        "k": options.k,
        "training": trained["results"],
        "walk": measure(walks[options.k], options.k),
        "reference": None,
        "engine": None,
        "same_documents": None,
        "by_k": {str(k): measure(walks[k], k) for k in options.k_table},
        "expected_at_temperature_1": expected_acceptance(head, context, store, documents, options.k),
        "certificate": None,
        "versions": versions(),
    }
    if Measurement.reference in options.measure:
        some = spread(documents, options.reference_documents)
        reference = run_reference(cfg, context, head, store, some, drafted)
        again = [walks[options.k][documents.index(i)] for i in some]
        report["reference"] = measure(reference.walks, options.k)
        report["same_documents"] = measure(again, options.k)
        report["certificate"] = certificate(reference.drafts, reference.outputs, reference.divergences)
    strongest = report["reference"] or report["walk"]
    report["gate"], _ = gate(strongest, report["certificate"], options.min_accepted_length, options.max_disagreement)
    return report


def run_reference(
    cfg: Config, context: Context, head: MtpHead, store: Store, documents: Sequence[int], drafted: dict[int, dict[int, list[int]]]
) -> ReferenceRun:
    """Generate each span of the documents again with target and head, and compare with the walk.

    The output is compared with the target's own greedy output: the stored response where it was generated greedily by this
    target, else a plain greedy generation made here.
    """
    model = load_model(context.folder, context.dtype, context.device, cfg.target.trust_remote_code)
    stop_ids = set(stop_token_ids(context.folder, load_tokenizer(context.folder, cfg.target.trust_remote_code)))
    result = ReferenceRun([], Agreement(), Agreement(), [])
    for i in tqdm(documents, "reference decoder", unit="document"):
        entry, tokens = store.entries[i], store.tokens(i).tolist()
        walk = DocumentWalk(entry.id, entry.source, 0, 0, [])
        for start, end in entry.spans:
            with context.autocast():
                out = speculate(
                    model,
                    head,
                    context.ends.embed_VH,
                    context.spec.embed_scale,
                    context.lm_head,
                    tokens[:start],
                    end - start,
                    stop_ids,
                    cfg.validate.k,
                )
                expected = tokens[start:end]
                if out.tokens != expected:
                    expected = greedy(model, context.lm_head, tokens[:start], end - start, stop_ids).tokens
            _add_span(result, walk, out, start, expected, drafted[i] if tokens[start:end] == expected else {})
        result.walks.append(walk)
    return result


def _add_span(
    result: ReferenceRun, walk: DocumentWalk, out: Generation, start: int, expected: list[int], drafted: dict[int, list[int]]
) -> None:
    outputs, common = compare_outputs(out, expected)
    result.outputs.add(outputs)
    if common < max(len(expected), len(out.tokens)):
        result.divergences.append({"id": walk.id, "token": common, "tie": bool(outputs.ties)})
    result.drafts.add(compare_drafts(out, drafted, start + common))
    end = start + len(out.tokens)
    walk.spans += 1
    walk.generated += len(out.tokens)
    for draft in out.drafts:
        room = end - (draft.row + 2)
        if room > 0:
            accepted = min(draft.accepted, room)
            walk.drafts.append(Draft(draft.row, draft.tokens[: min(accepted + 1, room)], accepted))


def print_table(report: dict[str, Any]) -> None:
    """Acceptance by draft length, then by source and measurement."""
    table = Table(title="acceptance on held-out documents (greedy)")
    for column in (
        "measured by",
        "documents",
        "K",
        "accepted length",
        "95 % interval",
        "tokens/target step",
        "accepted by depth (conditional)",
    ):
        table.add_column(column, justify="right" if column not in ("measured by",) else "left")
    rows = [(f"walk, K={k}", m["overall"]) for k, m in report["by_k"].items()]
    rows += [(f"walk, {source}", s) for source, s in report["walk"]["by_source"].items()]
    if report["reference"]:
        rows += [("walk, same documents", report["same_documents"]["overall"]), ("reference decoder", report["reference"]["overall"])]
    for name, s in rows:
        interval = s["mean_accepted_length_ci95"]
        table.add_row(
            name,
            str(s["documents"]),
            str(len(s["accept_rate_per_position"])),
            _number(s["mean_accepted_length"]),
            f"{interval[0]:.3f} .. {interval[1]:.3f}" if interval else "-",
            _number(s["tokens_per_target_step"]),
            " ".join(_number(r) for r in s["conditional_accept_rate"]),
        )
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)
    if found := report["certificate"]:
        console.print(
            f"drafted tokens equal in walk and reference: {found['drafted_token_agreement']:.4f} "
            f"({found['drafted_tokens_compared']} compared, {found['drafted_token_ties']} ties, raw {found['raw_agreement']:.4f}); "
            f"output equal to the target's own: "
            f"{found['output_agreement']:.4f} ({found['output_tokens_compared']} tokens)"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
