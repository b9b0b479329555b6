"""Which parts of the MTP head pay: trains variants on one store with the same tokens and seed, walks them on its held-out documents.

    python tools/bench_ablation.py runs/smollm2 [--variants mtp no_norms random last_layer] [--json FILE] [key=value ...]

The run's own config is the base (RUN/store/config.yaml); `key=value` changes it (for instance train.max_updates=100). Heads are written
to RUN/heads/ablation-*; a finished variant is reused.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import run_config

from mtptrain.config import Config
from mtptrain.files import read_json, write_json
from mtptrain.report.schema import REPORT
from mtptrain.stages import train, validate

_OFF = {"embed": False, "hidden": False, "input": False, "output": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "mtp": {},
    "no_norms": {"norms": _OFF},  # EAGLE's choice: only the post-attention norm stays
    "no_embed_hidden": {"norms": {"embed": False, "hidden": False}},
    "no_input": {"norms": {"input": False}},
    "no_output": {"norms": {"output": False}},
    "random": {"init": "random"},
    "last_layer": {"init": "last_layer"},
    "last_layer_no_norms": {"init": "last_layer", "norms": _OFF},
}


def variant_config(base: Path, name: str, overrides: list[str]) -> Config:
    """The run's config with the variant's head and a label of its own."""
    changes = {
        "head": VARIANTS[name] | {"label": f"ablation-{name}"},
        "validate": {"measure": ["walk"], "min_accepted_length": 0},
        "wandb": {"mode": "disabled"},
    }
    return run_config(base, changes, overrides)


def measure(cfg: Config) -> dict[str, Any]:
    train.run(cfg)
    validate.run(cfg)
    report = read_json(cfg.report_dir / REPORT)
    best = read_json(cfg.train_dir / "manifest.json")["results"]
    overall = report["walk"]["overall"]
    return {
        "mean_accepted_length": overall["mean_accepted_length"],
        "ci95": overall["mean_accepted_length_ci95"],
        "conditional": overall["conditional_accept_rate"],
        "by_source": {s: m["mean_accepted_length"] for s, m in report["walk"]["by_source"].items()},
        "supervised_rows": best["supervised_rows"],
        "seconds": best["seconds"],
        "parameters": best["parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--variants", nargs="+", default=["mtp", "no_norms", "random", "last_layer"], choices=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    if bad := [o for o in overrides if "=" not in o]:
        sys.exit(f"error: {bad[0]} is neither an option nor key=value")
    found = {name: measure(variant_config(arguments.run, name, overrides)) for name in arguments.variants}
    print("\n| variant | accepted length | 95 % interval | by depth (conditional) | supervised rows | seconds |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        low, high = row["ci95"]
        depth = " ".join(f"{r:.3f}" for r in row["conditional"])
        print(
            f"| {name} | {row['mean_accepted_length']:.3f} | {low:.3f} .. {high:.3f} | {depth} | "
            f"{row['supervised_rows']:,} | {row['seconds']:.0f} |"
        )
    print("\n" + json.dumps({name: row["by_source"] for name, row in found.items()}, indent=1))
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
