"""Small heads and documents for tests of heads, losses, walk and trainer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.config import HeadConfig
from mtptrain.heads.alignment import align, pack_alignments
from mtptrain.heads.build import build_head
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.head import DraftHead, init_random
from mtptrain.heads.lm_head import LmHead
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


def small_head(spec: TargetSpec, seed: int = 0, std: float = 0.3, draft_ids: Tensor | None = None, **head: Any) -> Any:
    """A head whose norms are not all ones, so that a dropped or doubled norm shows."""
    built: DraftHead = build_head(HeadConfig(**head), spec, draft_ids)
    init_random(built, std, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for _, p in sorted(built.named_parameters()):
            if p.dim() == 1:
                p.add_(torch.empty(p.shape).uniform_(-0.4, 0.4, generator=generator))
    return built


def small_embed(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed + 100))


def bound(head: DraftHead, embed: Tensor | None = None, lm_head: LmHead | None = None, scale: float = 1.0) -> Drafter:
    """The head on `embed`, the target's output projection as well unless `lm_head` is given; its own projection where it has one."""
    embed = small_embed() if embed is None else embed
    if head.lm_head is not None:
        lm_head = LmHead(head.lm_head.weight.detach(), ids_V=head.draft_ids)
    elif lm_head is None:
        lm_head = LmHead(embed if head.draft_ids is None else embed[head.draft_ids], ids_V=head.draft_ids)
    return Drafter(head, embed, scale, lm_head)


def small_batch(
    lengths: list[int], spans: list[list[tuple[int, int]]], steps: int, seed: int = 0, captures: Sequence[str] = ("final",)
) -> Batch:
    generator = torch.Generator().manual_seed(seed + 200)
    total = sum(lengths)
    return Batch(
        documents=list(range(len(lengths))),
        token_T=torch.randint(VOCAB, (total,), generator=generator),
        states={name: torch.randn(total, HIDDEN, generator=generator) for name in captures},
        rows=pack_alignments([align(n, s, steps) for n, s in zip(lengths, spans, strict=True)], lengths),
    )
