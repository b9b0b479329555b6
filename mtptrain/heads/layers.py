"""Building blocks of draft heads: RMSNorm, RoPE, a pre-norm GQA/SwiGLU decoder layer.

Legend: R rows, H hidden, I intermediate, N query heads, G key/value heads, D head size, T step-0 rows of a document.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mtptrain.config import HeadConfig
from mtptrain.target.spec import TargetSpec

_SCORES = 1 << 24
"""Attention scores, over all heads, that are worked on at once: 64 MB in each of a handful of arrays."""
_CACHED = 1 << 16
"""Elements of a matrix that are worked on at once on a CPU."""


@dataclass(slots=True, kw_only=True)
class LayerConfig:
    """Shape of a head's decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=dict)
    """transformers-5 `rope_parameters`."""
    attention_bias: bool = False
    """Bias on q, k, v."""
    qk_norm: bool = False
    sliding_window: int = 0
    """0: full attention. Otherwise a query sees keys fewer than this many positions back."""
    input_norm: bool = True
    post_attention_norm: bool = True
    attention_input: int = 0
    """Width of what q, k and v read; 0: hidden_size."""


def layer_config(spec: TargetSpec, **changes: Any) -> LayerConfig:
    """A layer of the target's sizes; `changes` override single fields."""
    values: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope": spec.rope,
        "attention_bias": spec.attention_bias,
        "qk_norm": spec.qk_norm,
        "sliding_window": spec.sliding_window or 0,
    } | changes
    return LayerConfig(**values)


def llama_layer_config(spec: TargetSpec, head: HeadConfig, **changes: Any) -> LayerConfig:
    """A Llama layer of the target's sizes: what engines' EAGLE classes compute, whatever the target's own attention adds."""
    window = spec.sliding_window or 0 if head.sliding_window is None else head.sliding_window
    return layer_config(spec, attention_bias=False, qk_norm=False, sliding_window=window, **changes)


class RmsNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 and returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNormed.apply(x, self.weight, self.eps)


class _RmsNormed(torch.autograd.Function):
    """Keeps its input and a scale a row for backward, where autograd would keep every step of the formula. Some rows at a time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1, device=x.device)
        for rows in _some_rows(x):
            wide = x[rows].float()
            scale[rows] = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            out[rows] = wide * scale[rows] * weight
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for rows in _some_rows(x):
            grad, normed = grads[0][rows].float(), x[rows].float() * scale[rows]
            if grad_weight is not None:
                grad_weight += (grad * normed).flatten(0, -2).sum(0)
            if grad_x is not None:
                inner = grad * weight
                grad_x[rows] = (inner - normed * (inner * normed).mean(-1, keepdim=True)).mul_(scale[rows])
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _some_rows(x: Tensor) -> list[slice]:
    """Of the first dimension: as much as a CPU's cache has room for beside a few more of its size; elsewhere all of it at once."""
    count = len(x) if x.device.type != "cpu" else _CACHED * len(x) // max(1, x.numel())
    return [slice(start, start + max(1, count)) for start in range(0, len(x), max(1, count))]


def norm_or_identity(size: int, eps: float, wanted: bool) -> nn.Module:
    return RmsNorm(size, eps) if wanted else nn.Identity()


class Rope(nn.Module):
    """Rotary position embedding of any transformers type (default, linear, dynamic, yarn, llama3, longrope).

    The frequencies come from transformers itself, so that they are the target's to the bit.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        shape = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope),
        )
        self.embedding = LlamaRotaryEmbedding(shape)

    def forward(self, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [R, 1, rotary size], for `position_R` int64."""
        like = torch.empty((), dtype=torch.float32, device=position_R.device)
        cos, sin = self.embedding(like, position_R[None])
        return cos[0, :, None], sin[0, :, None]


def rotate(x_RND: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE in float32 (first half paired with second half); channels past the rotary size pass through."""
    cos, sin = cos_sin
    size = cos.shape[-1]
    turned, rest = x_RND[..., :size].float(), x_RND[..., size:]
    low, high = turned.chunk(2, dim=-1)
    out = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((out.to(x_RND.dtype), rest), dim=-1)


class Attention(nn.Module):
    """The projections of grouped-query attention; which keys a query sees is the unroll's business."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        c = self.config = config
        width = c.attention_input or c.hidden_size
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = norm_or_identity(c.head_dim, c.rms_norm_eps, c.qk_norm)
        self.k_norm = norm_or_identity(c.head_dim, c.rms_norm_eps, c.qk_norm)

    def query(self, x_RH: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        q_RND = self.q_proj(x_RH).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        return rotate(self.q_norm(q_RND), cos_sin)

    def key_value(self, x_RH: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        sizes = (self.config.num_kv_heads, self.config.head_dim)
        k_RGD = self.k_proj(x_RH).unflatten(-1, sizes)
        return rotate(self.k_norm(k_RGD), cos_sin), self.v_proj(x_RH).unflatten(-1, sizes)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_RH: Tensor) -> Tensor:
        return self.down_proj(_Gated.apply(self.gate_proj(x_RH), self.up_proj(x_RH)))


class _Gated(torch.autograd.Function):
    """silu(gate) * up; keeps the two for backward and nothing between. Some rows at a time."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_RI, up_RI)
        product_RI = torch.empty_like(gate_RI)
        for rows in _some_rows(gate_RI):
            torch.mul(nn.functional.silu(gate_RI[rows]), up_RI[rows], out=product_RI[rows])
        return product_RI

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate_RI, up_RI = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_gate_RI, grad_up_RI = torch.empty_like(gate_RI), torch.empty_like(up_RI)
        for rows in _some_rows(gate_RI):
            gate, grad = gate_RI[rows], grads[0][rows]
            share = torch.sigmoid(gate)
            silu = gate * share
            slope = share.add_(silu - silu * share)  # sigmoid + silu (1 - sigmoid)
            torch.mul(grad, silu, out=grad_up_RI[rows])
            torch.mul(grad, up_RI[rows], out=grad_gate_RI[rows]).mul_(slope)
        return grad_gate_RI, grad_up_RI


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer, cut at the attention: `query`/`key_value` before it, `finish` after it.

    Legend: Z attention_input. What q, k and v read is the head's business (`DraftHead.enter`): usually `input_layernorm` of x.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.input_layernorm = norm_or_identity(config.hidden_size, config.rms_norm_eps, config.input_norm)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm_or_identity(config.hidden_size, config.rms_norm_eps, config.post_attention_norm)
        self.mlp = SwiGlu(config.hidden_size, config.intermediate_size)

    def query(self, z_RZ: Tensor, position_R: Tensor) -> Tensor:
        """Rotated queries [R, N, D]."""
        return self.self_attn.query(z_RZ, self.rope(position_R))

    def key_value(self, z_RZ: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [R, G, D]."""
        return self.self_attn.key_value(z_RZ, self.rope(position_R))

    def finish(self, x_RH: Tensor, mixed_RND: Tensor) -> Tensor:
        """Residual stream after the layer, from the one before it and the attention's output."""
        x_RH = x_RH + self.self_attn.o_proj(mixed_RND.flatten(1))
        return x_RH + self.mlp(self.post_attention_layernorm(x_RH))


def compile_layer(layer: DecoderLayer) -> None:
    """Compile, at their first use, the parts of the layer that training calls; any number of rows."""
    for name in ("query", "key_value", "finish"):
        setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))


def attend(
    q_RND: Tensor,
    position_R: Tensor,
    prefix: tuple[Tensor, Tensor],
    last_key_R: Tensor,
    own: list[tuple[Tensor, Tensor]],
    window: int,
) -> Tensor:
    """`_attend` of some rows at a time, whose scores backward computes again instead of keeping them: they grow with the square of a
    document's length.
    """
    count = max(1, _SCORES // max(1, q_RND.shape[1] * prefix[0].shape[0]))
    mixed = []
    for start in range(0, len(q_RND), count):
        rows = slice(start, start + count)
        part = (q_RND[rows], position_R[rows], prefix, last_key_R[rows], [(k[rows], v[rows]) for k, v in own], window)
        if torch.is_grad_enabled():
            mixed.append(checkpoint(_attend, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            mixed.append(_attend(*part))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _attend(
    q_RND: Tensor,
    position_R: Tensor,
    prefix: tuple[Tensor, Tensor],
    last_key_R: Tensor,
    own: list[tuple[Tensor, Tensor]],
    window: int,
) -> Tensor:
    """Attention of one document's query rows over its step-0 keys and each row's own later keys.

    Args:
        q_RND: rotated queries; `position_R` int64, their RoPE positions.
        prefix: keys and values [T, G, D] of rows at positions 0..T-1.
        last_key_R: last prefix row that query row r sees (its own row p).
        own: for each later step so far, keys and values [R, G, D] seen by their own row alone.
        window: sliding window, 0 for none; own keys always lie inside it when the window exceeds the draft length.

    Returns:
        [R, N, D] in q's dtype; scores and softmax are float32.
    """
    k_TGD, v_TGD = prefix
    rows, heads, size = q_RND.shape
    groups, keys = k_TGD.shape[1], k_TGD.shape[0]
    q_GMD = q_RND.reshape(rows, groups, heads // groups, size).permute(1, 2, 0, 3).reshape(groups, -1, size) * size**-0.5
    scores_GMT = (q_GMD @ k_TGD.permute(1, 2, 0)).float()
    index_T = torch.arange(keys, device=q_RND.device)
    hidden_RT = index_T > last_key_R[:, None]
    if window:
        hidden_RT |= index_T <= (position_R - window)[:, None]
    hidden_MT = hidden_RT.repeat(heads // groups, 1)
    scores_GMT = scores_GMT.masked_fill(hidden_MT, float("-inf"))
    own_k = [_per_query(k, heads // groups) for k, _ in own]
    own_v = [_per_query(v, heads // groups) for _, v in own]
    diagonal = [(q_GMD * k).sum(-1, keepdim=True).float() for k in own_k]
    weights = torch.cat([scores_GMT, *diagonal], dim=-1).softmax(-1).to(v_TGD.dtype)
    out_GMD = weights[..., :keys] @ v_TGD.permute(1, 0, 2)
    for step, v in enumerate(own_v):
        out_GMD = out_GMD + weights[..., keys + step, None] * v
    return out_GMD.reshape(groups, heads // groups, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)


def _per_query(x_RGD: Tensor, per_group: int) -> Tensor:
    """[R, G, D] -> [G, per_group * R, D], the order of the queries in `attend`."""
    return x_RGD.permute(1, 0, 2).repeat(1, per_group, 1)
