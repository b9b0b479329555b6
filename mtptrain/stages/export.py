"""The export stage: the candidate that validate measured, under a name that says how far it is proven.

export/vllm            the gate is open, and the engine itself ran it
export/vllm.unproven   the gate is open, but no engine has read it
export/vllm.rejected   the gate is shut; it is kept to be looked at, and the job fails
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from mtptrain import manifest
from mtptrain.config import Config, VllmLayout
from mtptrain.config_io import config_yaml
from mtptrain.errors import UserError
from mtptrain.exporters.conventions import certificate_file
from mtptrain.exporters.vllm import METHOD, VllmExport, pick_layout, to_vllm
from mtptrain.files import hash_file, read_json, write_folder_atomic, write_json, write_text
from mtptrain.heads.mtp import MtpHead, mtp_config
from mtptrain.report.schema import REPORT, gate, strongest
from mtptrain.stages.context import Context, load_trained_head, open_context, trained_head_hash, versions
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec

THRESHOLDS = ("min_accepted_length", "max_disagreement")
"""Options of validate that judge what was measured: another value needs no new measurement."""
PROVEN, UNPROVEN, REJECTED = "vllm", "vllm.unproven", "vllm.rejected"


def run(cfg: Config) -> None:
    """Write the folder that the report allows. Raises UserError where the gate is shut or the engine cannot express the head."""
    found = manifest.require(cfg.report_dir, "the validation report", "python -m mtptrain.validate (with the same arguments)")
    context = open_context(cfg)
    head, _ = load_trained_head(cfg, context)
    report = read_json(cfg.report_dir / REPORT)
    judge(cfg, report)
    if found["inputs"]["head"] != trained_head_hash(cfg):
        raise UserError(
            f"{cfg.report_dir / REPORT} was measured on another head; run python -m mtptrain.validate (with the same arguments) again"
        )
    export = to_vllm(head, context.spec, layout_of(cfg, context.spec))
    if report["layout"] != export.layout.name:
        raise UserError(
            f"{cfg.report_dir / REPORT} was measured on the {report['layout']} layout, not on {export.layout.name}; run "
            "python -m mtptrain.validate (with the same arguments) again"
        )
    inputs = {"head": trained_head_hash(cfg), "report": found["inputs"], "engines": [e.name for e in cfg.export.engines]}
    folder = cfg.export_dir / folder_name(report)
    if not manifest.is_complete(cfg.export_dir, inputs, cfg.on_stale) or not _is_whole(cfg.export_dir, folder):
        manifest.begin(cfg.export_dir, inputs)
        _write(cfg, context, head, export, report)
        hashes = {file.name: hash_file(file) for file in sorted(folder.iterdir())}
        manifest.finish(cfg.export_dir, inputs, {"folder": folder.name, "proof": report["proof"], "hashes": hashes})
    if report["gate"]["reasons"]:
        raise shut(cfg, report)
    print_summary(cfg, context.folder, report)


def layout_of(cfg: Config, spec: TargetSpec) -> VllmLayout:
    """The layout that `export.vllm.layout` means for this head. UserError where it can't be."""
    return pick_layout(cfg.export.vllm.layout, mtp_config(cfg.head, spec), spec, cfg.engine.tensor_parallel)


def judge(cfg: Config, report: dict[str, Any]) -> bool:
    """Set the report's gate and serving command by the thresholds asked for now; whether that changed it."""
    before = report.get("gate"), report.get("serve")
    report["gate"] = gate(report, *(getattr(cfg.validate, name) for name in THRESHOLDS))
    open_folder = None if report["gate"]["reasons"] else cfg.export_dir / folder_name(report)
    report["serve"] = open_folder and serve_command(resolve_target(cfg.target), open_folder, report["k"])
    return before != (report["gate"], report["serve"])


def _is_whole(export_dir: Path, folder: Path) -> bool:
    """Whether the finished folder is the one that was written, byte for byte; a damaged one is said."""
    written = read_json(export_dir / manifest.MANIFEST)["results"]
    if written.get("folder") != folder.name:
        return False
    for name, digest in written["hashes"].items():
        if not (folder / name).is_file() or hash_file(folder / name) != digest:
            print(f"export: {folder / name} is damaged or missing; the folder is written again", flush=True)
            return False
    return True


def folder_name(report: dict[str, Any]) -> str:
    if report["gate"]["reasons"]:
        return REJECTED
    return PROVEN if report["proof"] == "engine" else UNPROVEN


def shut(cfg: Config, report: dict[str, Any]) -> UserError:
    """Why there is no export."""
    return UserError(
        f"the gate is shut, nothing is exported: {'; '.join(report['gate']['reasons'])} (report: {cfg.report_dir / REPORT}; the candidate "
        f"is kept in {cfg.export_dir / REJECTED})"
    )


def _write(cfg: Config, context: Context, head: MtpHead, export: VllmExport, report: dict[str, Any]) -> None:
    about = certificate_file(
        head.config,
        context.spec,
        engine="vllm",
        layout=export.layout.name,
        proof=report["proof"],
        target=report["target"],
        certificate=report["certificate"],
    )
    about |= {"report": summary(report), "gate": report["gate"], "versions": versions() | report["versions"]}

    def write(folder: Path) -> None:
        export.write(folder)
        write_json(folder / "mtptrain.json", about)
        write_text(folder / "config.yaml", config_yaml(cfg))

    for other in {PROVEN, UNPROVEN, REJECTED} - {folder_name(report)}:
        if (cfg.export_dir / other).exists():
            shutil.rmtree(cfg.export_dir / other)
    write_folder_atomic(cfg.export_dir / folder_name(report), write)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures a reader of the export wants to see first."""
    name, measured = strongest(report)
    return {
        "k": report["k"],
        "measured_by": name,
        "mean_accepted_length": measured["overall"]["mean_accepted_length"],
        "walk_mean_accepted_length": report["walk"]["overall"]["mean_accepted_length"],
    }


def serve_command(target: Path, folder: Path, k: int) -> str:
    """What to paste, from any folder, to serve the head in vLLM."""
    speculative = json.dumps({"method": METHOD, "model": str(folder.resolve()), "num_speculative_tokens": k}, ensure_ascii=False)
    return shlex.join(["vllm", "serve", str(target.resolve()), "--speculative-config", speculative])


def print_summary(cfg: Config, target: Path, report: dict[str, Any]) -> None:
    """Where everything lies, how far it is proven, and the command that serves it."""
    figures, folder = summary(report), cfg.export_dir / folder_name(report)
    proven = "the engine ran it" if report["proof"] == "engine" else "no engine has run it yet"
    plugin = "\n           (first, where vLLM is installed: pip install --no-deps mtptrain)" if report["layout"] == "plugin" else ""
    print(
        f"export: {folder} (mean accepted length {figures['mean_accepted_length']:.3f} at K={figures['k']}, measured by "
        f"{figures['measured_by']}; {proven})\n"
        f"  report   {cfg.report_dir / REPORT}\n"
        f"  serve    {serve_command(target, folder, report['k'])}{plugin}",
        flush=True,
    )
