"""`speculators` 0.9 beside mtptrain: the same responses and target states in its layout, and its trainer in a process of its own.

Its environment: `python -m venv RIVAL && RIVAL/bin/pip install speculators==0.9.0`; the benchmarks take RIVAL/bin/python as `--rival`.
With a CPU build of torch, `RIVAL/bin/pip uninstall torchvision torchaudio`: transformers imports them where they are, and they want CUDA.
"""

import json
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench import apart, prepare_store
from datasets import load_from_disk
from safetensors.torch import save_file

from mtptrain.cli import compose
from mtptrain.config import Config
from mtptrain.files import read_json
from mtptrain.store.reader import Store
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec

HERE = Path(__file__).parent
_SEQUENCE = 1024
"""Tokens of a packed row."""
_LR = "1e-2"
"""Of its Muon, the optimizer it trains with by default."""


def streams(num_layers: int) -> list[str]:
    """The states the rival's EAGLE-3 reads of a target, and the last layer's output, which its teacher is made of."""
    return [f"after_{i}" for i in (1, num_layers // 2 - 1, num_layers - 4, num_layers - 1)]


def bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16; elsewhere PyTorch emulates it, tens of times slower than float32."""
    return platform.machine() == "x86_64" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def shared_data(overrides: list[str]) -> tuple[list[str], Store]:
    """The overrides with every state that a side reads, and the store that has them, made where it is not there yet."""
    names = streams(read_spec(resolve_target(compose(overrides)[0].target)).num_layers)
    wanted = [*overrides, f"precompute.captures=[final,{','.join(names)}]"]
    return wanted, Store.open(Path(apart(prepare_store, wanted)["store"]), names)


class Rival:
    """The rival's data and heads in the run's folder, made of `store`. `python`: its interpreter."""

    def __init__(self, python: Path, cfg: Config, store: Store, threads: int) -> None:
        self.python, self.threads, self.target = python, threads, resolve_target(cfg.target)
        self.folder = (cfg.run_dir / "rival").resolve()
        self._prepare(store, read_spec(self.target).num_layers)

    def _prepare(self, store: Store, num_layers: int) -> None:
        """Write the store's training documents as the rival's own preparation does, and their states beside them."""
        if (self.folder / "states" / "done").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        documents = {}
        with open(self.folder / "rows.jsonl", "w") as out:
            for i in store.indices("train"):
                tokens, mask = store.tokens(i).tolist(), [0] * store.entries[i].length
                for begin, end in store.entries[i].spans:
                    mask[begin:end] = [1] * (end - begin)
                documents[tuple(tokens)] = i
                out.write(json.dumps({"input_ids": tokens, "loss_mask": mask}) + "\n")
        command: list[str | Path] = [self.python.parent / "speculators", "prepare-data", "--model", self.target]
        command += ["--data", self.folder / "rows.jsonl"]
        command += ["--output", self.folder / "data", "--seq-length", "2048", "--num-preprocessing-workers", "1", "--no-skip-token-freq"]
        self._run(command, "prepare.log")
        (self.folder / "states").mkdir()
        for row, ids in enumerate(load_from_disk(str(self.folder / "data")).with_format(None)["input_ids"]):
            i = documents[tuple(ids)]
            states = torch.stack([store.state(i, name) for name in streams(num_layers)], 1).contiguous()
            save_file({"token_ids": torch.tensor(ids), "hidden_states": states}, str(self.folder / "states" / f"hs_{row}.safetensors"))
        (self.folder / "states" / "done").touch()

    def train(self, name: str, draft_vocabulary: int | None, steps: int, epochs: int = 1) -> dict[str, Any]:
        """Train an EAGLE-3 head of one Llama layer for K=3; what rival_train.py reports, and `head`, its folder."""
        data = self.folder / f"data-{draft_vocabulary or 'full'}"  # the mapping of a reduced vocabulary is written into it
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(self.folder / "data", data)
        head, report = self.folder / name, self.folder / f"{name}.json"
        shutil.rmtree(head, ignore_errors=True)
        command: list[str | Path] = [self.python, HERE / "rival_train.py", report, str(self.threads)]
        command += ["--verifier-name-or-path", self.target, "--speculator-type", "eagle3", "--draft-arch", "llama", "--num-layers", "1"]
        command += ["--draft-attn-impl", "sdpa", "--ttt-steps", "3", "--loss-implementation", "eager", "--on-missing", "raise"]
        command += ["--total-seq-len", str(_SEQUENCE), "--num-workers", "0", "--log-freq", "20", "--save-path", head]
        command += ["--data-path", data, "--hidden-states-path", self.folder / "states", "--epochs", str(epochs), "--max-steps", str(steps)]
        command += ["--hidden-states-dtype", "bfloat16" if bf16_units() else "float32"]
        command += ["--lr", _LR]
        if draft_vocabulary:
            command += ["--draft-vocab-size", str(draft_vocabulary)]
        self._run(command, f"{name}.log")
        return read_json(report) | {"head": str(head / str(epochs - 1))}

    def _run(self, command: list[str | Path], log: str) -> None:
        with open(self.folder / log, "w") as out:
            done = subprocess.run([str(c) for c in command], cwd=self.folder, stdout=out, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            sys.exit(f"error: the rival ended with status {done.returncode}; see {self.folder / log}")


def rate(report: dict[str, Any], skip: int = 2) -> float:
    """Loss-bearing tokens a second: of all steps but the first ones, by their median time."""
    steps = report["steps"][skip:]
    return sum(tokens for _, tokens in steps) / len(steps) / statistics.median(seconds for seconds, _ in steps)
