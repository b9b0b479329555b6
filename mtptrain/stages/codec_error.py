"""What the store's codecs do to states and teacher, measured on held-out states, which the store keeps exact."""

from collections.abc import Sequence
from typing import Any

import torch

from mtptrain.stages.context import Context
from mtptrain.store.codecs import codec_of
from mtptrain.store.format import FINAL
from mtptrain.store.reader import Store

_ROWS = 2048
"""Of states at most, evenly spaced."""
_LOGIT_ROWS = 128


def codec_error(store: Store, context: Context, captures: Sequence[str], documents: Sequence[int]) -> dict[str, Any]:
    """For each capture its codec and the mean over rows of |decoded - state| / |state| (Euclidean); for the teacher the mean divergence
    KL(exact || decoded) in nats, and the share of rows whose first choice changed. Coded for the purpose, as a shard of these rows.
    """
    found: dict[str, Any] = {"codec": {}, "relative_error": {}}
    for capture in captures:
        tag = store.manifest["results"]["captures"][capture]["codec"]
        codec = codec_of(tag, store.folder)
        every_NH = torch.cat([store.state(i, capture) for i in documents])
        state_NH = every_NH[:: -(-len(every_NH) // _ROWS)].clone()
        store.release()
        decoded_NH = codec.decode(codec.encode(state_NH), 0, len(state_NH))
        exact_NH, error_NH = state_NH.float(), decoded_NH.float() - state_NH.float()
        found["codec"][capture] = "{name} {version}".format(**tag)
        found["relative_error"][capture] = float((error_NH.norm(dim=1) / exact_NH.norm(dim=1).clamp_min(1e-30)).mean())
        if capture == FINAL:
            divergence, changed = 0.0, 0
            for p_RH, q_RH in zip(state_NH.split(_LOGIT_ROWS), decoded_NH.split(_LOGIT_ROWS), strict=True):
                p_RV, q_RV = (context.lm_head.logits(s.to(context.device, context.dtype)).log_softmax(-1) for s in (p_RH, q_RH))
                divergence += float((p_RV.exp() * (p_RV - q_RV)).double().sum())
                changed += int((p_RV.argmax(-1) != q_RV.argmax(-1)).sum())
            found |= {"rows": len(state_NH), "teacher_kl": divergence / len(state_NH), "first_choice_changed": changed / len(state_NH)}
    return found
