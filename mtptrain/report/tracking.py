"""Training curves on wandb: offline unless logged in. The same rows go to log.jsonl in any case."""

import netrc
import os
from types import TracebackType
from typing import Any

from mtptrain.config import Config, WandbMode
from mtptrain.files import hash_bytes


def _logged_in() -> bool:
    """Whether wandb has a key to use: its environment variable or an entry in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested numbers and lists of numbers as `a/b/0` keys."""
    out: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            out |= _flat({str(i): v for i, v in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            out[prefix + key] = value
    return out


class Tracker:
    """Prints each log row on one line and sends it to wandb unless `wandb.mode=disabled`."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._run: Any = None

    def __enter__(self) -> "Tracker":
        mode = self._cfg.wandb.mode
        if mode is WandbMode.disabled:
            return self
        import wandb

        if mode is WandbMode.auto:
            mode = WandbMode.online if _logged_in() else WandbMode.offline
        self._cfg.train_dir.mkdir(parents=True, exist_ok=True)
        name = f"{self._cfg.name}-{self._cfg.head_dir.name}"
        self._run = wandb.init(
            project=self._cfg.wandb.project,
            name=name,
            id=hash_bytes(str(self._cfg.train_dir.resolve()).encode())[:12],
            resume="allow",
            mode="online" if mode is WandbMode.online else "offline",
            dir=self._cfg.train_dir,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return self

    def log(self, row: dict[str, Any]) -> None:
        from tqdm import tqdm

        tqdm.write(format_row(row))
        if self._run is not None:
            self._run.log(_flat({k: v for k, v in row.items() if k != "update"}), step=row["update"])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if kind is None else 1)


def format_row(row: dict[str, Any]) -> str:
    """One console line of a log row."""
    if "walk" in row:
        walk = row["walk"]
        rates = " ".join(f"{r:.3f}" for r in walk["conditional_accept_rate"] if r is not None)
        length = walk["mean_accepted_length"]
        return f"  update {row['update']:>6}  held-out walk: accepted length {length:.3f}, by depth (conditional) {rates}"
    if "skipped" in row:
        return f"  update {row['update']:>6}  passed over: {row['skipped']}; its documents: {', '.join(row['documents'])}"
    numbers = " ".join(f"{m:.3f}" for m in row["match"])
    return (
        f"  update {row['update']:>6}  loss {row['loss']:.4f}  match by step {numbers}  lr {row['lr']:.2e}  "
        f"grad {row['grad_norm']:.2f}  {row['supervised_per_second']:.0f} supervised tokens/s"
    )
