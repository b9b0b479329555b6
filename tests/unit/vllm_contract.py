"""What stock vLLM computes from an exported folder, in float64, written from its names and config keys alone (no import of the head).

EagleDeepseekV3ForCausalLM with zero MLA head sizes: fc over [enorm(embed); hnorm(hidden)], one pre-norm layer with fused q, k, v and
rotate-half RoPE, final norm; the normed output is both the logits' input and the recycled state.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

NAMES = {
    "fc.weight",
    "enorm.weight",
    "hnorm.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.qkv_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
}


class StockDraft:
    """`recycle` and the other switches exist to show that a wrong convention changes the result."""

    def __init__(self, folder: Path, *, order: str = "embed_hidden", zero_first: bool = False, theta_factor: float = 1.0) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        assert set(self.w) == NAMES
        c = self.config
        assert c["qk_nope_head_dim"] == c["qk_rope_head_dim"] == c["v_head_dim"] == 0
        self.heads, self.kv = c["num_attention_heads"], c["num_key_value_heads"]
        self.size = c["hidden_size"] // self.heads
        self.order, self.zero_first = order, zero_first
        self.theta = c["rope_parameters"]["rope_theta"] * theta_factor

    def norm(self, name: str, x_TH: Tensor) -> Tensor:
        scale = torch.rsqrt(x_TH.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x_TH * scale * self.w[name + ".weight"]

    def rope(self, x_TND: Tensor, position_T: Tensor) -> Tensor:
        frequency = self.theta ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angle = (position_T[:, None].double() * frequency)[:, None]
        a, b = x_TND.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def forward(self, embed_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """Draft prefill over rows 0..T-1: the normed states [T, H]."""
        position_T = torch.arange(len(embed_TH))
        embed_TH = embed_TH.double().clone()
        if self.zero_first:
            embed_TH[0] = 0
        parts = [self.norm("enorm", embed_TH), self.norm("hnorm", hidden_TH.double())]
        x_TH = torch.cat(parts if self.order == "embed_hidden" else parts[::-1], -1) @ self.w["fc.weight"].T
        qkv = self.norm("layers.0.input_layernorm", x_TH) @ self.w["layers.0.self_attn.qkv_proj.weight"].T
        q, k, v = qkv.split([self.heads * self.size, self.kv * self.size, self.kv * self.size], -1)
        q, k = (self.rope(t.unflatten(-1, (-1, self.size)), position_T) for t in (q, k))
        v = v.unflatten(-1, (-1, self.size))
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q, k) / math.sqrt(self.size)
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
        x_TH = x_TH + mixed @ self.w["layers.0.self_attn.o_proj.weight"].T
        h = self.norm("layers.0.post_attention_layernorm", x_TH)
        gate, up = (h @ self.w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x_TH = x_TH + (torch.nn.functional.silu(gate) * up) @ self.w["layers.0.mlp.down_proj.weight"].T
        return self.norm("norm", x_TH)
