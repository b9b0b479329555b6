"""The heads in float64, written again from their formulas: no import from heads/, one row and one key at a time.

Independent of the package's unroll, alignment, layers and RoPE; slow and obvious.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate pairs (i, i + d/2) of one head by position * theta^(-2i/d)."""
    d = len(x)
    out = torch.empty_like(x)
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        a, b = x[i], x[i + d // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Layer64:
    """What the heads share: a decoder layer over single rows. `weights`: parameters by the head's names, any dtype."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int, kv_heads: int, head_dim: int, eps: float, theta: float) -> None:
        self.w = {name: t.double() for name, t in weights.items()}
        self.heads, self.kv_heads, self.head_dim, self.eps, self.theta = heads, kv_heads, head_dim, eps, theta

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """A missing norm is an identity."""
        return rms(x, self.w.get(f"{name}.weight"), self.eps)

    def _project(self, name: str, z: Tensor, count: int) -> Tensor:
        flat = self.w[f"layer.self_attn.{name}.weight"] @ z
        if f"layer.self_attn.{name}.bias" in self.w:
            flat = flat + self.w[f"layer.self_attn.{name}.bias"]
        return flat.view(count, self.head_dim)

    def key(self, z: Tensor, position: int) -> Tensor:
        k = self._project("k_proj", z, self.kv_heads)
        return torch.stack([rotary(rms(h, self.w.get("layer.self_attn.k_norm.weight"), self.eps), position, self.theta) for h in k])

    def value(self, z: Tensor) -> Tensor:
        return self._project("v_proj", z, self.kv_heads)

    def layer(self, x: Tensor, z: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The residual stream x after the layer whose attention reads z, attending to `keys` and `values` (its own among them)."""
        q = self._project("q_proj", z, self.heads)
        q = torch.stack([rotary(rms(h, self.w.get("layer.self_attn.q_norm.weight"), self.eps), position, self.theta) for h in q])
        mixed = []
        for n in range(self.heads):
            g = n // (self.heads // self.kv_heads)
            scores = torch.stack([(q[n] * k[g]).sum() for k in keys]) / math.sqrt(self.head_dim)
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            mixed.append(sum(w * v[g] for w, v in zip(weights, values, strict=True)))
        x = x + self.w["layer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        h = self._norm("layer.post_attention_layernorm", x)
        gate = self.w["layer.mlp.gate_proj.weight"] @ h
        return x + self.w["layer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (self.w["layer.mlp.up_proj.weight"] @ h))

    def enter(self, embed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream before the layer, and what its attention reads."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the output projection reads, and what is recycled."""
        raise NotImplementedError

    def draft_states(
        self, embed: Tensor, tokens: list[int], finals: Tensor, p: int, steps: int, drafted: list[int] | None = None
    ) -> list[Tensor]:
        """States for the output projection at steps 0 .. steps-1 of row p: keys are the step-0 keys of rows 0..p and the row's own later
        steps. `finals`: the hidden state of step 0 at each row.

        The token of step k is tokens[p+1+k], or drafted[k-1] for k >= 1 where `drafted` is given.
        """
        entered = [self.enter(embed[tokens[r + 1]].double(), finals[r].double()) for r in range(p + 1)]
        keys, values = [self.key(z, r) for r, (_, z) in enumerate(entered)], [self.value(z) for _, z in entered]
        x, z = entered[p]
        states, recycled = [], torch.empty(0)
        for k in range(steps):
            if k:
                token = tokens[p + 1 + k] if drafted is None else drafted[k - 1]
                x, z = self.enter(embed[token].double(), recycled)
                keys.append(self.key(z, p + k))
                values.append(self.value(z))
            state, recycled = self.leave(self.layer(x, z, p + k, keys, values))
            states.append(state)
        return states


class Mtp64(Layer64):
    """DeepSeek-V3's module: [embedding; hidden] normed apart, a pre-norm layer, the normed output recycled."""

    def enter(self, embed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.w["eh_proj.weight"] @ torch.cat((self._norm("enorm", embed), self._norm("hnorm", hidden)))
        return x, self._norm("layer.input_layernorm", x)

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self._norm("norm", x)
        return y, y


class Eagle64(Layer64):
    """EAGLE-1: [embedding; hidden] as they are, no norm before the attention, none at the end."""

    def enter(self, embed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.w["fc.weight"] @ torch.cat((embed, hidden)) + self.w.get("fc.bias", 0.0)
        return x, x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Eagle3_64(Layer64):
    """EAGLE-3: attention over [normed embedding; normed hidden], residual from the hidden state, pre-norm recycled by default."""

    def __init__(self, *args: Any, norm_before_residual: bool = False, norm_output: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output

    def fuse(self, streams: list[Tensor]) -> Tensor:
        """g_0 of one row from the target's streams."""
        size = len(streams[0])
        whole = self._norm("input_norm", torch.cat([s.double() for s in streams]))
        parts = [self._norm(f"fc_norms.{i}", whole[i * size : (i + 1) * size]) for i in range(len(streams))]
        return sum(self.w["fc.weight"][:, i * size : (i + 1) * size] @ part for i, part in enumerate(parts))  # type: ignore[return-value]

    def enter(self, embed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._norm("hidden_norm", hidden)
        return normed if self.norm_before_residual else hidden, torch.cat((self._norm("embed_norm", embed), normed))

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self._norm("norm", x)
        return y, y if self.norm_output else x
