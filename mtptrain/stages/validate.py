"""The validate stage: the trained head's acceptance by walk, reference decoder and engine, whether they agree, and the gate.

What is measured is what will be served: the head's weights are those of the candidate folder, rounded to its dtype.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mtptrain import manifest
from mtptrain.config import Config, Measurement
from mtptrain.config import Engine as EngineName
from mtptrain.engines.process import Engine, engine_inputs, find_engine
from mtptrain.engines.vllm import EngineRun
from mtptrain.exporters.folder import Written
from mtptrain.exporters.hf import from_hf
from mtptrain.exporters.vllm import from_vllm
from mtptrain.files import read_json, write_folder_atomic
from mtptrain.heads.build import head_record
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.head import DraftHead
from mtptrain.report.console import print_report
from mtptrain.report.measurement import measure
from mtptrain.report.page import PAGE
from mtptrain.report.schema import REPORT, SCHEMA, certificate, strongest
from mtptrain.sizes import stored_bytes_per_token
from mtptrain.stages import export as export_stage
from mtptrain.stages.codec_error import codec_error
from mtptrain.stages.context import (
    Context,
    TrainedHead,
    as_plain,
    load_trained_head,
    open_context,
    open_store,
    store_fingerprint,
    versions,
)
from mtptrain.stages.engine_trial import HEAD, NONE, Findings, certify, drafts_to_try, rendering, run_trials, walks_of
from mtptrain.stages.export import THRESHOLDS, judge, made, refuse_early
from mtptrain.stages.reference import run_reference
from mtptrain.stages.report_files import measured_hash, read_report, write_report
from mtptrain.stages.samples import heat_strips
from mtptrain.stages.train import spread
from mtptrain.stages.walk import expected_acceptance, walk_documents
from mtptrain.store.format import FINAL
from mtptrain.store.reader import Store
from mtptrain.target.ends import weights_hash
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec, read_spec

CANDIDATE = "candidate"
"""Folder inside the report's: what will be exported if the gate opens."""
_EXPECTED_DOCUMENTS = 16
"""Held-out documents of the expectation at temperature 1: it looks at every row, so it is dearer than the walk."""
_OFFLINE_TIE = "at most two units in the last place of bfloat16 below the best logit"
_ENGINE_TIE = "drafted tokens: at most two units in the last place of the engine's dtype below the best logit; outputs: of bfloat16"


def run(cfg: Config) -> None:
    """Measure, write report/report.json, print the table. Raises UserError when the gate is shut."""
    engine = check_first(cfg)
    context = open_context(cfg)
    trained = load_trained_head(cfg, context)
    drafter = context.bind(trained.head)
    export = candidate(cfg, drafter, context.spec)
    inputs = validate_inputs(cfg, context, trained, engine, export)
    if engine is None and (measured := _measured_with(cfg)) is not None:
        inputs["engine"] = measured
    if manifest.is_complete(cfg.report_dir, inputs, cfg.on_stale) and (cfg.report_dir / REPORT).exists():
        report = read_report(cfg)
        if judge(cfg, report) or not (cfg.report_dir / PAGE).exists():
            write_report(cfg, report)
    else:
        manifest.begin(cfg.report_dir, inputs)
        write_folder_atomic(cfg.report_dir / CANDIDATE, export.write)
        trained.head.load_state_dict(_read_back(cfg.report_dir / CANDIDATE, export, trained.head))
        report = _measure(cfg, context, trained, engine, export)
        write_report(cfg, report)
        manifest.finish(cfg.report_dir, inputs, {"proof": report["proof"], "report": measured_hash(report)})
    print_report(report)
    print(f"validate: {cfg.report_dir / PAGE} and {REPORT}", flush=True)
    if report["gate"]["reasons"]:
        export_stage.run(cfg)  # keeps the candidate under the name of a rejected one, and fails


def check_first(cfg: Config) -> Engine | None:
    """Refuse, before anything is spent or deleted, what this stage or the export would refuse later; the engine to measure with."""
    drafts_to_try(cfg, cfg.report_dir)
    refuse_early(cfg, read_spec(resolve_target(cfg.target)))
    return _engine(cfg)


def _measured_with(cfg: Config) -> dict[str, Any] | None:
    """The engine of a finished report: with none at hand now, what it measured still holds."""
    if Measurement.vllm not in cfg.validate.measure or not (cfg.report_dir / manifest.MANIFEST).exists():
        return None
    found: dict[str, Any] | None = read_json(cfg.report_dir / manifest.MANIFEST).get("inputs", {}).get("engine")
    return found


def candidate(cfg: Config, drafter: Drafter, spec: TargetSpec) -> Written:
    """What is measured: vLLM's folder, or where vLLM is not exported for, our own of the same dtype."""
    return made(cfg, EngineName.vllm if EngineName.vllm in cfg.export.engines else EngineName.hf, drafter, spec)


def _read_back(folder: Path, export: Written, head: DraftHead) -> dict[str, Tensor]:
    return from_hf(folder).state_dict() if export.layout == "hf" else from_vllm(folder, head)


def _engine(cfg: Config) -> Engine | None:
    """The engine to measure with; its absence is said, and the export's name will say it too."""
    if Measurement.vllm not in cfg.validate.measure or EngineName.vllm not in cfg.export.engines:
        return None
    engine = find_engine(cfg)
    if engine is None and _measured_with(cfg) is None:
        missing = "engine.python=none" if cfg.engine.python == "none" else "no vLLM was found (tools/setup_engine installs one)"
        print(f"validate: {missing}: the engine is not measured, and the export will be called vllm.unproven", flush=True)
    return engine


def validate_inputs(cfg: Config, context: Context, trained: TrainedHead, engine: Engine | None, export: Written) -> dict[str, Any]:
    return {
        "head": trained.weights,
        "store": store_fingerprint(cfg),
        "target": weights_hash(context.folder),
        "validate": {k: [m.name for m in v] if k == "measure" else v for k, v in as_plain(cfg.validate).items() if k not in THRESHOLDS},
        "validate.draft_model": cfg.validate.draft_model and weights_hash(Path(cfg.validate.draft_model).expanduser()),
        "dtype": str(context.dtype).removeprefix("torch."),
        "target.dtype": cfg.target.dtype.name,
        "layout": _vllm_layout(export),
        "engine": engine and engine_inputs(cfg, engine),
    }


def _vllm_layout(export: Written) -> str | None:
    """Of the candidate; None where it is not vLLM's."""
    return None if export.layout == "hf" else export.layout


def _measure(cfg: Config, context: Context, trained: TrainedHead, engine: Engine | None, export: Written) -> dict[str, Any]:
    head, options = trained.head, cfg.validate
    store = open_store(cfg, head.captures)
    documents = spread(store.indices("held_out"), options.documents)
    ks = sorted({options.k, *options.k_table})
    walks, drafted = walk_documents(head, context, store, documents, ks)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "target": {"path": cfg.target.path, "weights": weights_hash(context.folder), "model_type": context.spec.model_type},
        "head": {"kind": cfg.head.kind.name, "label": cfg.head_dir.name, "config": _shape(cfg, head)} | head_cost(cfg, context, head),
        "k": options.k,
        "training": trained.results,
        "walk": measure(walks[options.k], options.k),
        "reference": None,
        "engine": None,
        "same_documents": None,
        "by_k": {str(k): measure(walks[k], k) for k in options.k_table},
        "baselines": None,
        "speed": None,
        "counters": None,
        "expected_at_temperature_1": expected_acceptance(head, context, store, spread(documents, _EXPECTED_DOCUMENTS), options.k),
        "certificate": None,
        "samples": None,
        "rendering": None,
        "codec_error": codec_error(store, context, list(dict.fromkeys((FINAL, *head.captures))), documents),
        "layout": _vllm_layout(export),
        "versions": versions(),
    }
    same = dict(zip(documents, walks[options.k], strict=True))
    if engine is not None:
        runs = run_trials(cfg, context, engine, drafts_to_try(cfg, cfg.report_dir / CANDIDATE), store, documents)
        findings = certify(cfg, context, head, store, documents, runs[NONE], runs[HEAD])
        report |= _engine_parts(cfg, context, store, documents, runs, findings)
        report["rendering"] = rendering(cfg, context, runs[NONE])
        report["same_documents"] = {"walk": report["walk"], "reference": report["reference"], "engine": report["engine"]}
        report["versions"] |= {f"engine.{name}": version for name, version in runs[HEAD].versions.items()}
    elif Measurement.reference in options.measure:
        some = spread(documents, options.reference_documents)
        reference = run_reference(cfg, context, head, store, some, drafted)
        report["reference"] = measure(reference.walks, options.k)
        walk = measure([same[i] for i in some], options.k)
        report["same_documents"] = {"walk": walk, "reference": report["reference"], "engine": None}
        report["certificate"] = certificate(["walk", "reference"], reference.drafts, reference.outputs, reference.divergences, _OFFLINE_TIE)
    report["proof"], _ = strongest(report)
    judge(cfg, report)
    return report


def _shape(cfg: Config, head: DraftHead) -> dict[str, Any]:
    """The options it was made by; of a checkpoint's head, whose options they are not, its own shape."""
    return as_plain(cfg.head) if cfg.head.checkpoint is None else {"checkpoint": cfg.head.checkpoint} | head_record(head)


def head_cost(cfg: Config, context: Context, head: DraftHead) -> dict[str, Any]:
    """What the head takes: weights, those that one drafted token is multiplied with, and the store's bytes of a token for its training."""
    parameters = sum(p.numel() for p in head.parameters())
    projection = context.bind(head).lm_head.weight_VH.numel()
    own = 0 if head.lm_head is None else projection
    captures = list(dict.fromkeys(("final", *head.captures)))
    return {
        "parameters": parameters,
        "parameters_per_drafted_token": parameters - own + projection,
        "captures": list(head.captures),
        "draft_vocabulary": len(head.draft_ids) if head.draft_ids is not None else context.spec.vocab_size,
        "store_bytes_per_token": stored_bytes_per_token(cfg.store, captures, context.spec),
    }


def _engine_parts(
    cfg: Config, context: Context, store: Store, documents: Sequence[int], runs: dict[str, EngineRun], findings: Findings
) -> dict[str, Any]:
    k = cfg.validate.k
    made = certificate(["reference", "engine"], findings.drafts, findings.outputs, findings.divergences, _ENGINE_TIE)
    made["target_agreement"] = findings.target.agreement
    made["raw_target_agreement"] = findings.target.raw
    made["target_tokens_compared"] = findings.target.compared
    made["differing_drafts"] = findings.differing[:50]
    made["drafts_altered_by_the_scheduler"] = runs[HEAD].altered
    return {
        "engine": measure(findings.engine, k),
        "reference": measure(findings.reference, k),
        "certificate": made,
        "baselines": {name: measure(walks_of(run, store, documents), k) for name, run in runs.items() if name not in (NONE, HEAD)},
        "speed": {
            "rows": [
                {"method": name, "k": 0 if name == NONE else k} | row | {"tokens_per_second": row["tokens"] / row["seconds"]}
                for name, run in runs.items()
                for row in run.speed
            ],
            "load_seconds": {name: run.load_seconds for name, run in runs.items()},
        },
        "counters": runs[HEAD].counters,
        "samples": heat_strips(context.folder, cfg.target.trust_remote_code, store, documents, runs[HEAD]),
    }
