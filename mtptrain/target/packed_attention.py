"""Attention inside each document of a packed sequence, for any transformers model: no mask is built, nothing is padded.

Registered with transformers under `PACKED`; its documents are the standard `cu_seq_lens_q` keyword of the model's forward.
Legend: N query heads, G key/value heads, T packed tokens, t tokens of one document, D head size.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "mtptrain_packed"


def packed_attention(
    module: nn.Module,
    query_1NTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention (within `sliding_window`, with score `softcap`, where the layer has them) per document. Returns [1, T, N, D]."""
    window = sliding_window or getattr(module, "sliding_window", None)
    gqa = query_1NTD.shape[1] != key_1GTD.shape[1]
    outputs = []
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        query, key, value = (x[:, :, start:end] for x in (query_1NTD, key_1GTD, value_1GTD))
        reach = window if window is not None and end - start > window else None
        if softcap:
            outputs.append(_softcapped(query, key, value, causal_mask(end - start, reach, query.device), scaling, softcap))
        elif reach:
            mask_tt = causal_mask(end - start, reach, query.device)
            outputs.append(scaled_dot_product_attention(query, key, value, attn_mask=mask_tt, scale=scaling, enable_gqa=gqa))
        else:
            outputs.append(scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def causal_mask(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [t, t]: a token sees itself and what came before it, fewer than `window` tokens back."""
    position = torch.arange(tokens, device=device)
    back_tt = position[:, None] - position[None, :]
    seen_tt = back_tt >= 0
    return seen_tt if window is None else seen_tt & (back_tt < window)


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask_tt: Tensor, scaling: float | None, softcap: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask_tt, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


AttentionInterface.register(PACKED, packed_attention)
