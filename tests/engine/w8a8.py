"""Int8 targets for tests: symmetric weights a channel, dynamic activations a token, in the compressed-tensors format."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "observer": "minmax"}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True, "observer": None},
            "output_activations": None,
        }
    },
}


MOST = 63
"""Largest weight. 127 would be allowed, but a CPU without VNNI adds two products in 16 bits, where 2 * 255 * 127 saturates."""


def quantize(folder: Path) -> Path:
    """Quantise every projection of a target's layers in place."""
    path = folder / "model.safetensors"
    quantized: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        if not name.endswith("_proj.weight"):
            quantized[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True) / MOST
        quantized[name] = (weight.float() / scale).round().clamp(-MOST, MOST).to(torch.int8)
        quantized[name + "_scale"] = scale.to(torch.float32)
    save_file(quantized, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder
