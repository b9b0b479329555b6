"""The export stage: one folder an engine, written only when the gate of validate is open."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mtptrain import manifest
from mtptrain.config import Config
from mtptrain.config_io import config_yaml
from mtptrain.errors import UserError
from mtptrain.exporters.conventions import certificate_file
from mtptrain.exporters.vllm import to_vllm
from mtptrain.files import read_json, write_folder_atomic, write_json, write_text
from mtptrain.report.schema import REPORT
from mtptrain.stages.context import load_trained_head, open_context, trained_head_hash, versions

UNPROVEN = "vllm.unproven"
"""No engine has read the folder yet: the proof is the reference decoder's."""


def run(cfg: Config) -> None:
    """Write export/<engine>[.unproven]. Raises UserError where the gate is shut or the engine cannot express the head."""
    found = manifest.require(cfg.report_dir, "the validation report", "python -m mtptrain.validate (with the same arguments)")
    if reasons := found["results"]["gate"]["reasons"]:
        raise UserError(f"the gate is shut, nothing is exported: {'; '.join(reasons)} (report: {cfg.report_dir / REPORT})")
    context = open_context(cfg)
    head, _ = load_trained_head(cfg, context)
    report = read_json(cfg.report_dir / REPORT)
    inputs = {
        "head": trained_head_hash(cfg),
        "report": found["inputs"],
        "engines": [e.name for e in cfg.export.engines],
    }
    if found["inputs"]["head"] != inputs["head"]:
        raise UserError(
            f"{cfg.report_dir / REPORT} was measured on another head; run python -m mtptrain.validate (with the same arguments) again"
        )
    if not manifest.is_complete(cfg.export_dir, inputs, cfg.on_stale) or not (cfg.export_dir / UNPROVEN).exists():
        config, tensors = to_vllm(head, context.spec)
        manifest.begin(cfg.export_dir, inputs)
        proof = "reference" if report["reference"] else "contract"
        about = certificate_file(
            head.config,
            context.spec,
            engine="vllm",
            layout="stock",
            proof=proof,
            target=report["target"],
            certificate=report["certificate"],
        )
        about |= {"report": summary(report), "versions": versions()}

        def write(folder: Path) -> None:
            write_json(folder / "config.json", config)
            write_json(folder / "mtptrain.json", about)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            write_text(folder / "config.yaml", config_yaml(cfg))

        write_folder_atomic(cfg.export_dir / UNPROVEN, write)
        manifest.finish(cfg.export_dir, inputs, {"folders": [UNPROVEN], "proof": proof})
    print_summary(cfg, context.folder, report)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures a reader of the export wants to see first."""
    strongest = report["reference"] or report["walk"]
    return {
        "k": report["k"],
        "measured_by": "reference" if report["reference"] else "walk",
        "mean_accepted_length": strongest["overall"]["mean_accepted_length"],
        "walk_mean_accepted_length": report["walk"]["overall"]["mean_accepted_length"],
    }


def print_summary(cfg: Config, target: Path, report: dict[str, Any]) -> None:
    """Where everything lies, how far it is proven, and the command that serves it."""
    figures, folder = summary(report), cfg.export_dir / UNPROVEN
    speculative = f'{{"method": "eagle", "model": "{folder}", "num_speculative_tokens": {report["k"]}}}'
    print(
        f"export: {folder} (mean accepted length {figures['mean_accepted_length']:.3f} at K={figures['k']}, measured by "
        f"{figures['measured_by']}; no engine has run it yet)\n"
        f"  report   {cfg.report_dir / REPORT}\n"
        f"  serve    vllm serve {target} --speculative-config '{speculative}'",
        flush=True,
    )
