"""What llama.cpp computes from an eagle3 GGUF, in float64, written from its names and keys alone (no import of the head or its exporter).

Encoder: fc over what enters the layers `target_layers`, in their order. Decoder: attn_norm of the embedding and attn_norm_2 of g feed
attention; NORM RoPE (neighbouring channels turn together); the residual is g; output_norm feeds the projection, the state before it is
recycled. Row p is (state at p, token p+1) at position p; a recycled step has the drafted token one position further.
"""

import math
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor

LAYER = (
    *(f"attn_{x}" for x in ("norm", "norm_2", "q", "k", "v", "output")),
    *(f"ffn_{x}" for x in ("norm", "gate", "up", "down")),
)
NAMES = {"fc.weight", "output_norm.weight", *(f"blk.0.{name}.weight" for name in LAYER)}
OPTIONAL = {"d2t", "output.weight", "enc.output_norm.weight", "rope_freqs.weight"}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """By name, in the dtype of the file."""
    read = {}
    for t in GGUFReader(path).tensors:
        data = torch.from_numpy(t.data.copy())
        read[t.name] = data.view(torch.bfloat16) if t.tensor_type.name == "BF16" else data
    return read


def keys_of(path: Path) -> dict[str, Any]:
    """Metadata without GGUF's own fields."""
    return {name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}


class Eagle3Draft:
    """The switches exist to show that a wrong convention changes the result."""

    def __init__(
        self,
        path: Path,
        *,
        after: bool = False,
        reverse: bool = False,
        order: str = "embed_hidden",
        hidden_norm: bool = True,
        swap_norms: bool = False,
        flip_residual: bool = False,
        recycle: str = "pre_norm",
        offsets: bool = False,
        neox: bool = False,
        theta_factor: float = 1.0,
        rope_scaling: bool = True,
        one_plus: bool = False,
        zero_first: bool = False,
        still: bool = False,
    ) -> None:
        self.kv = {name.removeprefix("eagle3."): value for name, value in keys_of(path).items()}
        assert self.kv["general.architecture"] == "eagle3"
        assert self.kv["block_count"] == 1
        self.w = {name: t if t.dtype is torch.int64 else t.double() for name, t in tensors_of(path).items()}
        assert set(self.w) >= NAMES
        assert set(self.w) <= NAMES | OPTIONAL
        assert ("enc.output_norm.weight" in self.w) == self.kv["norm_before_fc"]
        self.heads, self.kv_heads = self.kv["attention.head_count"], self.kv["attention.head_count_kv"]
        self.after, self.reverse, self.order, self.hidden_norm = after, reverse, order, hidden_norm
        self.swap_norms, self.recycle, self.offsets, self.neox = swap_norms, recycle, offsets, neox
        self.residual_norm = self.kv["norm_before_residual"] != flip_residual
        self.rope_scaling, self.one_plus, self.zero_first, self.still = rope_scaling, one_plus, zero_first, still
        self.base = self.kv["rope.freq_base"] * theta_factor

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[f"{name}.weight"] + float(self.one_plus)
        return x / (x.square().mean() + self.kv["attention.layer_norm_rms_epsilon"]).sqrt() * weight

    def matrix(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x

    def turn(self, position: int, pair: int) -> tuple[float, float]:
        """Cosine and sine, times the magnitude, of a pair of channels (ggml's rope_yarn)."""
        count = self.kv["rope.dimension_count"]
        plain = position * self.base ** (-2 * pair / count)
        if not self.rope_scaling:
            return math.cos(plain), math.sin(plain)
        if "rope_freqs.weight" in self.w:
            plain /= float(self.w["rope_freqs.weight"][pair])
        kind, factor = self.kv.get("rope.scaling.type", "none"), self.kv.get("rope.scaling.factor", 1.0)
        angle, magnitude = plain / factor, 1.0
        if kind == "yarn":
            low, high = max(math.floor(self.corner(32)), 0), min(math.ceil(self.corner(1)), count - 1)
            mix = 1 - min(max((pair - low) / max(0.001, high - low), 0), 1)
            angle, magnitude = angle * (1 - mix) + plain * mix, 1 + 0.1 * math.log(factor)
        return math.cos(angle) * magnitude, math.sin(angle) * magnitude

    def corner(self, turns: float) -> float:
        length = self.kv["rope.scaling.original_context_length"]
        return self.kv["rope.dimension_count"] * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def rotate(self, x_D: Tensor, position: int) -> Tensor:
        count, out = self.kv["rope.dimension_count"], x_D.clone()
        for pair in range(count // 2):
            i, j = (pair, pair + count // 2) if self.neox else (2 * pair, 2 * pair + 1)
            cos, sin = self.turn(position, pair)
            out[i], out[j] = x_D[i] * cos - x_D[j] * sin, x_D[i] * sin + x_D[j] * cos
        return out

    def encode(self, inputs: dict[int, Tensor], row: int) -> Tensor:
        """g of a row from `inputs`: what enters each layer of the target, [T, H]."""
        ids = [i + int(self.after) for i in self.kv["target_layers"]]
        x = torch.cat([inputs[i][row].double() for i in (ids[::-1] if self.reverse else ids)])
        return self.matrix("fc", self.norm("enc.output_norm", x) if self.kv["norm_before_fc"] else x)

    def decode(self, embed: Tensor, g: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The state before output_norm; the row's key and value are appended to `cache`."""
        names = ("blk.0.attn_norm_2", "blk.0.attn_norm") if self.swap_norms else ("blk.0.attn_norm", "blk.0.attn_norm_2")
        normed = self.norm(names[1], g) if self.hidden_norm else g
        parts = [self.norm(names[0], embed), normed]
        z = torch.cat(parts if self.order == "embed_hidden" else parts[::-1])
        q, k, v = (self.matrix(f"blk.0.attn_{x}", z) for x in "qkv")
        q_ND, k_GD, v_GD = (t.view(n, -1) for t, n in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        q_ND, k_GD = (torch.stack([self.rotate(x, position) for x in t]) for t in (q_ND, k_GD))
        cache.append((k_GD, v_GD))
        mixed = []
        for n in range(self.heads):
            group = n // (self.heads // self.kv_heads)
            keys, values = (torch.stack([entry[x][group] for entry in cache]) for x in (0, 1))
            mixed.append((keys @ q_ND[n] / math.sqrt(self.kv["attention.key_length"])).softmax(0) @ values)
        u = (normed if self.residual_norm else g) + self.matrix("blk.0.attn_output", torch.cat(mixed))
        h = self.norm("blk.0.ffn_norm", u)
        gate = torch.nn.functional.silu(self.matrix("blk.0.ffn_gate", h))
        return u + self.matrix("blk.0.ffn_down", gate * self.matrix("blk.0.ffn_up", h))

    def token(self, state: Tensor, target_output_VH: Tensor) -> int:
        """The greedily drafted token of a normed state."""
        row = int((self.w.get("output.weight", target_output_VH.double()) @ state).argmax())
        if "d2t" not in self.w:
            return row
        return int(self.w["d2t"][row]) + (row if self.offsets else 0)

    def draft(
        self, embed_VH: Tensor, token_T: Tensor, inputs: dict[int, Tensor], steps: int, output_VH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every row 0..T-2 of a document drafts `steps` tokens: normed states [steps, T-1, H] and tokens [steps, T-1].

        `embed_VH`, `output_VH`: the target's; one matrix where only the first is given.
        """
        output_VH = embed_VH if output_VH is None else output_VH
        prefix: list[tuple[Tensor, Tensor]] = []
        states, tokens = [], []
        for p in range(len(token_T) - 1):
            embed = embed_VH[token_T[p + 1]].double() * (0.0 if self.zero_first and p == 0 else 1.0)
            x = self.decode(embed, self.encode(inputs, p), p, prefix)
            cache = list(prefix)
            row_states, row_tokens = [self.norm("output_norm", x)], [self.token(self.norm("output_norm", x), output_VH)]
            for step in range(1, steps):
                g = row_states[-1] if self.recycle == "post_norm" else x
                x = self.decode(embed_VH[row_tokens[-1] % len(embed_VH)].double(), g, p if self.still else p + step, cache)
                row_states.append(self.norm("output_norm", x))
                row_tokens.append(self.token(row_states[-1], output_VH))
            states.append(torch.stack(row_states))
            tokens.append(row_tokens)
        return torch.stack(states, dim=1), torch.tensor(tokens).T
