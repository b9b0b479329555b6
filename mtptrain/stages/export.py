"""The export stage: the head that validate measured, one folder an engine, under a name that says how far it is proven.

export/vllm            the gate is open, and the engine itself ran it
export/vllm.unproven   the gate is open, but no engine has read it
export/sglang, ...     the gate is open; the folder is what that engine's source asks for, which a test-only loader checks
export/*.rejected      the gate is shut; it is kept to be looked at, and the job fails
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from mtptrain import manifest
from mtptrain.config import Config, Engine, HeadKind
from mtptrain.config_io import config_yaml
from mtptrain.errors import UserError
from mtptrain.exporters.conventions import certificate_file
from mtptrain.exporters.engines import refuse, to_engine
from mtptrain.exporters.folder import Written
from mtptrain.exporters.vllm import METHODS, pick_layout, to_vllm
from mtptrain.files import hash_file, read_json, write_folder_atomic, write_json, write_text
from mtptrain.heads.build import head_shape
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.head import DraftHead
from mtptrain.report.schema import REPORT, gate, strongest
from mtptrain.stages.context import Context, load_trained_head, open_context, versions, wanted_captures
from mtptrain.stages.report_files import read_report, write_report
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec

THRESHOLDS = ("min_accepted_length", "max_disagreement")
"""Options of validate that judge what was measured: another value needs no new measurement."""


def run(cfg: Config) -> None:
    """Write the folders that the report allows. Raises UserError where the gate is shut or an engine cannot express the head."""
    found = manifest.require(cfg.report_dir, "the validation report", "python -m mtptrain.validate (with the same arguments)")
    context = open_context(cfg)
    trained = load_trained_head(cfg, context)
    report = read_report(cfg)
    if judge(cfg, report):
        write_report(cfg, report)
    if found["inputs"]["head"] != trained.weights:
        raise UserError(
            f"{cfg.report_dir / REPORT} was measured on another head; run python -m mtptrain.validate (with the same arguments) again"
        )
    drafter = context.bind(trained.head)
    exports = {engine: made(cfg, engine, drafter, context.spec) for engine in cfg.export.engines}
    layout = exports[Engine.vllm].layout if Engine.vllm in exports else None
    if layout is not None and report["layout"] != layout:
        raise UserError(
            f"{cfg.report_dir / REPORT} was measured on the {report['layout']} layout of vLLM, not on {layout}; run "
            "python -m mtptrain.validate (with the same arguments) again"
        )
    inputs = {"head": trained.weights, "report": found["inputs"], "engines": [e.name for e in cfg.export.engines]}
    folders = {cfg.export_dir / folder_name(report, engine): engine for engine in exports}
    if not manifest.is_complete(cfg.export_dir, inputs, cfg.on_stale) or not _is_whole(cfg.export_dir, list(folders)):
        manifest.begin(cfg.export_dir, inputs)
        _forget_others(cfg, list(folders))
        hashes = {}
        for folder, engine in folders.items():
            _write(cfg, context, trained.head, exports[engine], engine, folder, report)
            hashes[folder.name] = {file.name: hash_file(file) for file in sorted(folder.iterdir())}
        manifest.finish(cfg.export_dir, inputs, {"proof": report["proof"], "folders": hashes})
    if report["gate"]["reasons"]:
        raise shut(cfg, report)
    print_summary(cfg, context.folder, report)


def made(cfg: Config, engine: Engine, drafter: Drafter, spec: TargetSpec) -> Written:
    """The head as `engine` loads it. UserError where it can't be."""
    if engine is not Engine.vllm:
        return to_engine(engine, drafter, spec)
    wanted = pick_layout(cfg.export.vllm.layout, drafter.head.config, spec, cfg.engine.tensor_parallel)
    known = cfg.target.path if ":" not in cfg.target.path else str(resolve_target(cfg.target).resolve())  # pypi:... means nothing to vLLM
    return to_vllm(drafter.head, spec, wanted, rows_DH=drafter.lm_head.weight_VH, k=cfg.validate.k, target=known)


def refuse_early(cfg: Config, spec: TargetSpec) -> None:
    """UserError where an engine of `export.engines` will not be able to express the head that `head.*` describes."""
    if cfg.head.checkpoint is not None:
        wanted_captures(cfg, spec)  # the checkpoint is there and of a known layout; what engines think of it is said once it is read
        return
    shape = head_shape(cfg.head, spec)
    for engine in cfg.export.engines:
        if engine is Engine.vllm:
            pick_layout(cfg.export.vllm.layout, shape, spec, cfg.engine.tensor_parallel)
        else:
            refuse(engine, shape, spec)


def judge(cfg: Config, report: dict[str, Any]) -> bool:
    """Set the report's gate and serving command by the thresholds asked for now; whether that changed it."""
    before = report.get("gate"), report.get("serve")
    report["gate"] = gate(report, *(getattr(cfg.validate, name) for name in THRESHOLDS))
    servable = report["layout"] is not None and Engine.vllm in cfg.export.engines and not report["gate"]["reasons"]
    report["serve"] = None
    if servable:
        folder = cfg.export_dir / folder_name(report, Engine.vllm)
        report["serve"] = serve_command(resolve_target(cfg.target), folder, report["k"], METHODS[HeadKind[report["head"]["kind"]]])
    return before != (report["gate"], report["serve"])


def _is_whole(export_dir: Path, folders: list[Path]) -> bool:
    """Whether the finished folders are the ones that were written, byte for byte; a damaged one is said."""
    written = read_json(export_dir / manifest.MANIFEST)["results"]["folders"]
    if set(written) != {folder.name for folder in folders}:
        return False
    for folder in folders:
        for name, digest in written[folder.name].items():
            if not (folder / name).is_file() or hash_file(folder / name) != digest:
                print(f"export: {folder / name} is damaged or missing; the folder is written again", flush=True)
                return False
    return True


def folder_name(report: dict[str, Any], engine: Engine) -> str:
    """Of an engine's folder. No engine but vLLM ran here, so what the others' mtptrain.json says of proof is `contract`."""
    if report["gate"]["reasons"]:
        return f"{engine.name}.rejected"
    return f"{engine.name}.unproven" if engine is Engine.vllm and report["proof"] != "engine" else engine.name


def _forget_others(cfg: Config, folders: list[Path]) -> None:
    """Folders of an earlier export, under other names or for other engines."""
    for engine in Engine:
        for name in (engine.name, f"{engine.name}.unproven", f"{engine.name}.rejected"):
            if (cfg.export_dir / name).exists() and cfg.export_dir / name not in folders:
                shutil.rmtree(cfg.export_dir / name)


def shut(cfg: Config, report: dict[str, Any]) -> UserError:
    """Why there is no export."""
    return UserError(
        f"the gate is shut, nothing is exported: {'; '.join(report['gate']['reasons'])} (report: {cfg.report_dir / REPORT}; the candidate "
        f"is kept in {cfg.export_dir}/*.rejected)"
    )


def _write(cfg: Config, context: Context, head: DraftHead, export: Written, engine: Engine, folder: Path, report: dict[str, Any]) -> None:
    """`folder`, whole, with what it was proven by beside it."""
    about = certificate_file(
        head.config,
        context.spec,
        engine=engine.name,
        layout=export.layout,
        proof=report["proof"] if engine is Engine.vllm else "contract",
        target=report["target"],
        certificate=report["certificate"] if engine is Engine.vllm else None,
    )
    about |= {"report": summary(report), "gate": report["gate"], "versions": versions() | report["versions"]}

    def write(temporary: Path) -> None:
        export.write(temporary)
        write_json(temporary / "mtptrain.json", about)
        write_text(temporary / "config.yaml", config_yaml(cfg))

    write_folder_atomic(folder, write)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures a reader of the export wants to see first."""
    name, measured = strongest(report)
    return {
        "k": report["k"],
        "measured_by": name,
        "mean_accepted_length": measured["overall"]["mean_accepted_length"],
        "walk_mean_accepted_length": report["walk"]["overall"]["mean_accepted_length"],
    }


def serve_command(target: Path, folder: Path, k: int, method: str) -> str:
    """What to paste, from any folder, to serve the head in vLLM."""
    speculative = json.dumps({"method": method, "model": str(folder.resolve()), "num_speculative_tokens": k}, ensure_ascii=False)
    return shlex.join(["vllm", "serve", str(target.resolve()), "--speculative-config", speculative])


def print_summary(cfg: Config, target: Path, report: dict[str, Any]) -> None:
    """Where everything lies, how far it is proven, and the command that serves it."""
    figures = summary(report)
    measured = f"mean accepted length {figures['mean_accepted_length']:.3f} at K={figures['k']}, measured by {figures['measured_by']}"
    lines = []
    for engine in cfg.export.engines:
        ran = engine is Engine.vllm and report["proof"] == "engine"
        proven = "the engine ran it" if ran else "no engine has run it yet"
        lines.append(f"export: {cfg.export_dir / folder_name(report, engine)} ({measured}; {proven})")
    lines.append(f"  report   {cfg.report_dir / REPORT}")
    if report["serve"]:
        lines.append(f"  serve    {report['serve']}")
    if report["layout"] == "plugin":
        lines.append("           (first, where vLLM is installed: pip install --no-deps mtptrain)")
    print("\n".join(lines), flush=True)
