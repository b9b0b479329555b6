"""The MTP head in float64, written again from its formulas: no import from heads/, one row and one key at a time.

Independent of the package's unroll, alignment, layers and RoPE; slow and obvious.
"""

import math

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


class Mtp64:
    """`weights`: parameters by the head's names, any dtype; a missing norm is an identity."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, head_dim: int, eps: float, theta: float) -> None:
        self.w = {name: t.double() for name, t in weights.items()}
        self.heads, self.kv_heads, self.head_dim, self.eps, self.theta = heads, kv_heads, head_dim, eps, theta

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.w.get(f"{name}.weight"), self.eps)

    def fuse(self, embed: Tensor, hidden: Tensor) -> Tensor:
        return self.w["eh_proj.weight"] @ torch.cat((self._norm("enorm", embed), self._norm("hnorm", hidden)))

    def _project(self, name: str, x: Tensor, count: int) -> Tensor:
        flat = self.w[f"layer.self_attn.{name}.weight"] @ self._norm("layer.input_layernorm", x)
        if f"layer.self_attn.{name}.bias" in self.w:
            flat = flat + self.w[f"layer.self_attn.{name}.bias"]
        return flat.view(count, self.head_dim)

    def key(self, x: Tensor, position: int) -> Tensor:
        k = self._project("k_proj", x, self.kv_heads)
        return torch.stack([rotary(rms(h, self.w.get("layer.self_attn.k_norm.weight"), self.eps), position, self.theta) for h in k])

    def value(self, x: Tensor) -> Tensor:
        return self._project("v_proj", x, self.kv_heads)

    def layer(self, x: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """x after the layer, attending to `keys` and `values` (its own among them)."""
        q = self._project("q_proj", x, self.heads)
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

    def draft_states(
        self, embed: Tensor, tokens: list[int], finals: Tensor, p: int, steps: int, drafted: list[int] | None = None
    ) -> list[Tensor]:
        """States y_0 .. y_{steps-1} of row p: keys are the step-0 keys of rows 0..p and the row's own later steps.

        The token of step k is tokens[p+1+k], or drafted[k-1] for k >= 1 where `drafted` is given.
        """
        xs = [self.fuse(embed[tokens[r + 1]].double(), finals[r].double()) for r in range(p + 1)]
        keys, values = [self.key(x, r) for r, x in enumerate(xs)], [self.value(x) for x in xs]
        states = [self._norm("norm", self.layer(xs[p], p, keys, values))]
        for k in range(1, steps):
            token = tokens[p + 1 + k] if drafted is None else drafted[k - 1]
            x = self.fuse(embed[token].double(), states[-1])
            keys.append(self.key(x, p + k))
            values.append(self.value(x))
            states.append(self._norm("norm", self.layer(x, p + k, keys, values)))
        return states
