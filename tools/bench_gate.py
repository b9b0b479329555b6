#!/usr/bin/env python3
"""Whether something became slower or larger: the short benchmarks' ratios against the ones that are checked in.

    python tools/bench_gate.py [--only startup,memory,train,store,precompute] [--update] [--json FILE]

Ratios compare two sides of one run (a step with what it must do or hold, the stage with the bare forward), so they mean the same on
another machine; seconds would not. A ratio may be worse than in tools/baseline.json by a hundredth (bytes on disk), a tenth (memory) or a
quarter (time: others use the machine too). Exit status 1 if one is worse. `--update` writes the baseline anew.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "baseline.json"
_TIME, _MEMORY, _SIZE = 0.25, 0.10, 0.01


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of a benchmark's JSON."""

    name: str
    of: Callable[[Any], float]
    higher_is_better: bool
    tolerance: float

    def worse(self, now: float, before: float) -> bool:
        return now < before * (1 - self.tolerance) if self.higher_is_better else now > before * (1 + self.tolerance)


def _reading(found: Any) -> float:
    rows = found["mtp"]
    return float(rows["store, int8"]["read_warm"] / rows["a file a sample, bf16"]["read_warm"])


def _encoding(found: Any) -> float:
    return float(found["codecs"]["int8, threads: 1"]["encode"] / found["limits"]["memory_gb_per_second"])


BENCHMARKS: dict[str, list[Ratio]] = {
    "startup": [
        Ratio("--help, times importing hydra", lambda found: found["--help"]["ratio"], False, _TIME),
        Ratio("a value out of range, times importing hydra", lambda found: found["value out of range"]["ratio"], False, _TIME),
    ],
    "memory": [
        Ratio("a step, times what it must hold", lambda found: found["sizes"][0]["ratio"], False, _MEMORY),
        Ratio("the same with four times the vocabulary", lambda found: found["sizes"][2]["ratio"], False, _MEMORY),
    ],
    "train": [
        Ratio("mtp over all ids, share of the floor", lambda found: found["full"]["mtp"]["share_of_floor"], True, _TIME),
        Ratio("mtp over 8,192 ids, share of the floor", lambda found: found["8192"]["mtp"]["share_of_floor"], True, _TIME),
        Ratio("eagle3 over 8,192 ids, share of the floor", lambda found: found["8192"]["eagle3"]["share_of_floor"], True, _TIME),
    ],
    "store": [
        Ratio("an mtp token in int8, bytes", lambda found: found["mtp"]["store, int8"]["bytes_per_token"], False, _SIZE),
        Ratio("an eagle3 token in int8, bytes", lambda found: found["eagle3"]["store, int8"]["bytes_per_token"], False, _SIZE),
        Ratio("reading the first, times a bf16 file a sample", _reading, True, _TIME),
        Ratio("encoding int8, times copying memory", _encoding, True, _TIME),
    ],
    "precompute": [
        Ratio("the stage, times one document a forward", lambda found: found["one at a time"]["ratio"], True, _TIME),
        Ratio("the stage, times the bare forward", lambda found: found["bare forward"]["ratio"], True, _TIME),
    ],
}


def measure(only: list[str]) -> dict[str, float]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in only:
            file = Path(folder) / f"{name}.json"
            subprocess.run([sys.executable, HERE / f"bench_{name}.py", "--json", file], check=True)
            results = json.loads(file.read_text())
            found |= {f"{name}: {ratio.name}": ratio.of(results) for ratio in BENCHMARKS[name]}
    return found


def compare(found: dict[str, float], baseline: dict[str, float]) -> list[str]:
    """The names of the ratios that are worse; prints them all."""
    worse = []
    for benchmark, ratios in BENCHMARKS.items():
        for ratio in ratios:
            name = f"{benchmark}: {ratio.name}"
            if name not in found:
                continue
            before, now = baseline.get(name), found[name]
            bad = before is not None and ratio.worse(now, before)
            shown = "no baseline" if before is None else f"{before:.2f} before{', WORSE' if bad else ''}"
            print(f"{name}: {now:.2f} ({shown})")
            worse += [name] if bad else []
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks, with commas between")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    only = arguments.only.split(",")
    if unknown := sorted(set(only) - set(BENCHMARKS)):
        parser.error(f"--only: no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    found = measure(only)
    worse = compare(found, baseline)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.update:
        BASELINE.write_text(json.dumps(baseline | {name: round(value, 3) for name, value in found.items()}, indent=1) + "\n")
    elif worse:
        sys.exit(1)


if __name__ == "__main__":
    main()
