"""Are the responses the target's own? A sample of them is scored by the target itself.

    nll_t      = -log p(x_t | x_<t)          of a supervised token x_t, p the target's distribution at temperature 1
    entropy_t  = -sum_v p(v) log p(v)        what nll_t is on average where x_t was drawn from p
    excess     = mean(nll - entropy)         0 for samples at temperature 1, below for cooler ones, above for another's text

The standard error of `excess` treats tokens of one document as one observation. A head learns to draft what the target says, so a clear
excess means that acceptance will stay low whatever is trained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mtptrain.data.documents import Document
from mtptrain.data.packing import pack
from mtptrain.target.model import capture_packed
from mtptrain.target.spec import TargetSpec

_BATCH_TOKENS = 2048
_ROWS = 128
"""Of logits at once."""
_CLEAR_NATS, _CLEAR_ERRORS = 0.1, 3.0


def sample(documents: Sequence[Document], count: int) -> list[Document]:
    """Evenly spaced, so that every source and split is among them."""
    count = min(count, len(documents))
    return [documents[i * len(documents) // count] for i in range(count)]


@torch.inference_mode()
def score(model: PreTrainedModel, spec: TargetSpec, documents: Sequence[Document]) -> dict[str, Any]:
    """The share of supervised tokens that are the target's first choice, and `excess` with its standard error, in nats a token."""
    hits = tokens = 0
    sums, counts = [], []
    for batch in pack([len(d.tokens) for d in documents], _BATCH_TOKENS):
        members = [documents[i] for i in batch]
        states = capture_packed(model, [d.tokens for d in members], ["final"])["final"].split([len(d.tokens) for d in members])
        for document, state_TH in zip(members, states, strict=True):
            at_R = torch.tensor([t for start, end in document.spans for t in range(start, end) if t > 0], device=state_TH.device)
            token_R = torch.tensor(document.tokens, device=state_TH.device)[at_R]
            excess, equal = _score_rows(model, spec, state_TH[at_R - 1], token_R)
            hits, tokens = hits + equal, tokens + len(at_R)
            sums.append(excess)
            counts.append(len(at_R))
    mean = sum(sums) / tokens
    residual_D = torch.tensor([s - mean * n for s, n in zip(sums, counts, strict=True)], dtype=torch.float64)
    error = float(residual_D.square().sum().sqrt()) / tokens  # of a ratio of sums over documents
    return {
        "documents": len(sums),
        "tokens": tokens,
        "first_choice_share": hits / tokens,
        "excess_nats": mean,
        "excess_standard_error": error,
        "anothers": mean > _CLEAR_NATS and mean > _CLEAR_ERRORS * error,
    }


def _score_rows(model: PreTrainedModel, spec: TargetSpec, state_RH: torch.Tensor, token_R: torch.Tensor) -> tuple[float, int]:
    """Sum of nll - entropy, and how many tokens are the first choice."""
    excess, equal = 0.0, 0
    for state_SH, token_S in zip(state_RH.split(_ROWS), token_R.split(_ROWS), strict=True):
        logits_SV = model.get_output_embeddings()(state_SH).float() * spec.logit_scale
        if spec.logit_softcap is not None:
            logits_SV = (logits_SV / spec.logit_softcap).tanh() * spec.logit_softcap
        log_SV = logits_SV.log_softmax(-1)
        equal += int((log_SV.argmax(-1) == token_S).sum())
        nll_S = -log_SV.gather(1, token_S[:, None]).squeeze(1)
        excess += float((nll_S + (log_SV.exp() * log_SV).sum(-1)).double().sum())
    return excess, equal


def warning(audit: dict[str, Any]) -> str | None:
    """What to tell where the responses are evidently another's."""
    if not audit["anothers"]:
        return None
    return (
        f"WARNING: the responses are not this target's own: each token is {audit['excess_nats']:.2f} nats less likely to it than what it "
        f"says itself, and only {audit['first_choice_share']:.0%} are its first choice. A head learns to draft what the target says, so "
        "acceptance will stay low; let the target answer (data.responses.mode=target), or give the target that wrote them"
    )
