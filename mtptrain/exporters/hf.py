"""Our own format: config.json says the head's shape, model.safetensors holds its tensors by our names; `head.checkpoint` reads it again."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from mtptrain import __version__
from mtptrain.exporters.folder import CONFIG, WEIGHTS, Export
from mtptrain.files import read_json
from mtptrain.heads.build import head_from_record, head_record
from mtptrain.heads.head import DraftHead
from mtptrain.target.spec import TargetSpec

KEY = "mtptrain_draft_head"
"""In config.json: the head's record."""


def to_hf(head: DraftHead, spec: TargetSpec, dtype: torch.dtype) -> Export:
    config = {
        "mtptrain": __version__,
        "model_type": "mtptrain_draft_head",
        "dtype": str(dtype).removeprefix("torch."),
        "target": {"model_type": spec.model_type, "hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size},
        KEY: head_record(head),
    }
    state = sorted(head.state_dict().items())
    return Export("hf", config, {n: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype).contiguous() for n, t in state})


def from_hf(folder: Path) -> DraftHead:
    """The head that `to_hf` wrote, in float32."""
    head = head_from_record(read_json(folder / CONFIG)[KEY])
    head.load_state_dict(load_file(folder / WEIGHTS))
    return head
