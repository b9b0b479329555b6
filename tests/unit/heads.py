"""Small heads and documents for tests of heads, losses, walk and trainer."""

from typing import Any

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.config import HeadConfig
from mtptrain.heads.alignment import align, pack_alignments
from mtptrain.heads.mtp import MtpHead, build_head, init_random
from mtptrain.target.spec import TargetSpec

VOCAB, HIDDEN = 31, 16
THETA, EPS = 100.0, 1e-5


def small_spec(**changes: Any) -> TargetSpec:
    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": EPS,
        "rope": {"rope_type": "default", "rope_theta": THETA},
        "eos_token_ids": [2],
    }
    return TargetSpec(**(values | changes))


def small_head(spec: TargetSpec, seed: int = 0, std: float = 0.3, **head: Any) -> MtpHead:
    """A head whose norms are not all ones, so that a dropped or doubled norm shows."""
    built = build_head(HeadConfig(**head), spec)
    init_random(built, std, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for _, p in sorted(built.named_parameters()):
            if p.dim() == 1:
                p.add_(torch.empty(p.shape).uniform_(-0.4, 0.4, generator=generator))
    return built


def small_embed(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed + 100))


def small_batch(lengths: list[int], spans: list[list[tuple[int, int]]], steps: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed + 200)
    total = sum(lengths)
    return Batch(
        documents=list(range(len(lengths))),
        token_T=torch.randint(VOCAB, (total,), generator=generator),
        final_TH=torch.randn(total, HIDDEN, generator=generator),
        rows=pack_alignments([align(n, s, steps) for n, s in zip(lengths, spans, strict=True)], lengths),
    )
