"""The head before its first update, and the shares of the learning rate that such weights ask for."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mtptrain.batches import Batch, load_batch
from mtptrain.config import Config, HeadInit, HeadKind, TrainConfig
from mtptrain.heads.build import build_head, init_from_last_layer, init_lm_head
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.head import DraftHead, init_random
from mtptrain.heads.least_squares import init_least_squares
from mtptrain.heads.lookup import init_lookup
from mtptrain.ranks import ALONE, Ranks
from mtptrain.stages.context import Context, open_checkpoint
from mtptrain.stages.vocabulary import draft_vocabulary
from mtptrain.store.reader import Store
from mtptrain.target.ends import load_last_layer
from mtptrain.trainer import epochs_of

_FUSION_LR = 0.2
"""Of `train.optim.lr`, for a fusing projection that starts from least squares: a full rate undoes more of it than it adds."""
_RAW_FUSION_LR = 0.01
"""The same, where it reads un-normed streams: some of their channels are hundreds of times larger than the others."""
_LOOKUP_LR = {"fusion_lr": 0.1, "query_key_lr": 0.2, "value_output_lr": 0.4}
"""The same, for an eagle3 head, whose attention starts as a lookup."""


def initial_head(
    cfg: Config, context: Context, store: Store, documents: list[int], ranks: Ranks = ALONE, usable: list[int] | None = None
) -> DraftHead:
    """The head before its first update: from `head.checkpoint`, else as `head.init` says. The first rank makes it, all get it.

    `usable`: those of the training documents whose states may be read; None: all.
    """
    head = empty_head(cfg, context, store, documents)
    if cfg.head.checkpoint is None:
        ranks.first(lambda: _fill(head, cfg, context, store, documents if usable is None else usable))
        ranks.broadcast_([parameter.detach() for parameter in head.parameters()])
    return head


def empty_head(cfg: Config, context: Context, store: Store, documents: list[int]) -> DraftHead:
    """The head of this shape, whatever its weights; with `head.checkpoint` those."""
    if cfg.head.checkpoint is not None:
        return open_checkpoint(cfg, context).to(context.device)
    head = build_head(cfg.head, context.spec, draft_vocabulary(cfg, context, store, documents))
    init_random(head, cfg.head.init_std, cfg.seed)
    return head.to(context.device)


def first_documents(cfg: Config, store: Store, documents: list[int]) -> list[int]:
    """Of which first weights may be made: all, or where documents are trained in groups of shards, those of the first."""
    together = cfg.train.shards_together
    if together is None:
        return documents
    order = [i for batch in epochs_of(cfg.train, cfg.seed, store, documents)[0] for i in batch]
    group = set(list(dict.fromkeys(store.entries[i].shard for i in order))[:together])
    return [i for i in documents if store.entries[i].shard in group]


def _fill(head: DraftHead, cfg: Config, context: Context, store: Store, documents: list[int]) -> None:
    init_lm_head(head, context.ends.lm_head_VH)
    if cfg.head.init is HeadInit.last_layer:
        init_from_last_layer(head, context.spec, load_last_layer(context.folder), context.ends.final_norm_H)
    if not from_least_squares(cfg):
        return
    order = random.Random(f"{cfg.seed}/least_squares").sample(documents, len(documents))
    norm_H = context.ends.final_norm_H.float() + context.spec.rms_norm_offset

    def batches() -> Iterator[Batch]:  # in float32 whatever training computes in: sums of products do not bear rounding
        return (load_batch(store, [i], head.captures, 1, torch.float32, context.device) for i in order)

    if isinstance(head, Eagle3Head):
        init_lookup(context.bind(head), batches, norm_H, cfg.seed)
    else:
        init_least_squares(context.bind(head), batches(), norm_H)


def from_least_squares(cfg: Config) -> bool:
    """Whether the head starts from least squares."""
    return cfg.head.checkpoint is None and cfg.head.init in (HeadInit.auto, HeadInit.least_squares)


def train_config(cfg: Config) -> TrainConfig:
    """`cfg.train` with the shares of the learning rate that the head's first weights ask for."""
    optim, head = cfg.train.optim, cfg.head
    shares: dict[str, Any] = {"fusion_lr": 1.0, "query_key_lr": 1.0, "value_output_lr": 1.0}
    if from_least_squares(cfg):
        shares |= {"fusion_lr": _FUSION_LR} if head.kind is not HeadKind.eagle3 else _LOOKUP_LR
        if head.kind is HeadKind.eagle3 and not (head.fc_norm or head.norm_before_fc):
            shares["fusion_lr"] = _RAW_FUSION_LR
    optim = replace(optim, **{name: share for name, share in shares.items() if getattr(optim, name) is None})
    return replace(cfg.train, optim=optim)
