"""What an exporter makes: the files of one folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mtptrain.files import save_tensors, write_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Written(Protocol):
    """Whatever an exporter made."""

    layout: str

    def write(self, folder: Path) -> None: ...


@dataclass(slots=True)
class Export:
    """config.json and model.safetensors. `layout`: which of an engine's layouts; the engine's own name where it has one."""

    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        write_json(folder / CONFIG, self.config)
        save_tensors(folder / WEIGHTS, self.tensors, {"format": "pt"})
