"""Are the states that are stored those of transformers' plain forward? Asked of the real target, for either backend.

T tokens of a document, H hidden size, V vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtptrain.data.documents import Document
from mtptrain.errors import UserError
from mtptrain.target.ends import load_ends
from mtptrain.target.model import capture_packed

LIMIT = 1e-5
"""Largest relative error in float32."""
_BEGINNING = 256
"""Tokens of a document that are compared at most: the plain forward makes logits of all of them."""
_TRIED = 16
"""Documents looked at for some whose states are finite."""


def check_packed(
    model: PreTrainedModel, target: Path, documents: list[Document], captures: list[str], batch_tokens: int, count: int
) -> None:
    """Of the packed forward, before anything is stored.

    Print, over the beginnings of the first few documents, the largest relative error of each capture (of a row: |packed - alone| /
    |alone|, Euclidean over H) and how often the teacher's first choice is the model's own. Raises UserError above `LIMIT` in float32.
    """
    names = list(dict.fromkeys([*captures, "final"]))
    cut = max(2, min(_BEGINNING, batch_tokens // count))
    tokens: list[list[int]] = []
    alone: list[dict[str, Tensor]] = []
    for document in documents[:_TRIED]:
        if len(tokens) == count:
            break
        states = one_document(model, document.tokens[:cut], names)
        if all(bool(torch.isfinite(state_TH).all()) for state_TH in states.values()):
            tokens.append(document.tokens[:cut])
            alone.append(states)
    if not tokens:
        print("precompute: parity not measured, the states of the first documents are not finite", flush=True)
        return
    packed = capture_packed(model, tokens, names)
    errors = {name: relative_error(packed[name], torch.cat([states[name] for states in alone])) for name in names}
    agreement = top1_agreement(target, packed["final"], torch.cat([states["top1"] for states in alone]))
    dtype = packed["final"].dtype
    shown = ", ".join(f"{name} {errors[name]:.1e}" for name in names)
    print(
        f"precompute: packed against one-document forward, {len(tokens)} documents, {sum(map(len, tokens))} tokens, "
        f"{str(dtype).removeprefix('torch.')}: largest relative error {shown}; teacher top-1 agreement {agreement:.2%}",
        flush=True,
    )
    failing = [name for name in names if not errors[name] <= LIMIT]
    if dtype is torch.float32 and failing:
        raise UserError(
            f"a packed forward of the target differs from a one-document forward by {errors[failing[0]]:.1e} at `{failing[0]}` (limit "
            f"{LIMIT:.0e} in float32): its attention does not keep documents apart; use precompute.batch_tokens=1 (one document a forward)"
        )


LEAST_COSINE = 0.99
"""Between a row of the engine and transformers' own, in the engine's dtype: below it something else than rounding is at work."""


def check_engine(
    model: PreTrainedModel, target: Path, documents: list[Document], states: list[dict[str, Tensor]], captures: list[str]
) -> dict[str, dict[str, float]]:
    """Of an engine's states ([T, H] as stored, one dict a document): print and return, for each capture, the smallest cosine and the
    largest relative error of a row, and for `final` how often lm_head's first choice is the same. Raises UserError below `LEAST_COSINE`.
    """
    found: dict[str, dict[str, float]] = {}
    alone = [one_document(model, d.tokens[:_BEGINNING], captures) for d in documents]
    for name in captures:
        ours = torch.cat([s[name][:_BEGINNING] for s in states]).float()
        theirs = torch.cat([s[name] for s in alone]).float().cpu()
        cosine = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=-1)
        found[name] = {"cosine": float(cosine.min()), "relative_error": relative_error(ours, theirs)}
        if name == "final":
            top1 = torch.cat([s["top1"] for s in alone]).cpu()
            found[name]["top1_agreement"] = top1_agreement(target, ours, top1)
    told = "; ".join(f"{name}: " + ", ".join(f"{k} {v:.6f}" for k, v in values.items()) for name, values in found.items())
    tokens = sum(len(s["top1"]) for s in alone)
    print(f"precompute: engine against transformers, {len(documents)} documents, {tokens} tokens (as stored, bf16): {told}", flush=True)
    if failing := [name for name in captures if not found[name]["cosine"] >= LEAST_COSINE]:
        raise UserError(
            f"the engine's `{failing[0]}` differs from transformers' forward of the same target (cosine {found[failing[0]]['cosine']:.4f}, "
            f"limit {LEAST_COSINE}): the two do not run the same model; compare their versions, or use precompute.backend=hf"
        )
    return found


@torch.no_grad()
def one_document(model: PreTrainedModel, tokens: list[int], names: list[str]) -> dict[str, Tensor]:
    """States [T, H] by transformers' own plain forward, and `top1` [T], its most probable next tokens.

    transformers returns the last layer's stream after the final norm only, so `after_<L-1>` comes from a capture of this document alone.
    """
    output = model(input_ids=torch.tensor([tokens], device=model.device), output_hidden_states=True, use_cache=False)
    layers = len(output.hidden_states) - 1
    states = {f"after_{i}": output.hidden_states[i + 1][0] for i in range(layers - 1)} | {"final": output.hidden_states[layers][0]}
    last = [name for name in names if name not in states]
    states |= capture_packed(model, [tokens], last) if last else {}
    return {name: states[name] for name in names} | {"top1": output.logits[0].argmax(-1)}


def relative_error(packed_TH: Tensor, alone_TH: Tensor) -> float:
    """Largest over rows of |packed - alone| / |alone|."""
    packed_TH, alone_TH = packed_TH.double(), alone_TH.double()
    return float(((packed_TH - alone_TH).norm(dim=-1) / alone_TH.norm(dim=-1).clamp_min(1e-30)).max())


def top1_agreement(target: Path, final_TH: Tensor, top1_T: Tensor) -> float:
    """Share of rows at which lm_head(final) has the model's own first choice. Logit scale and soft-cap are monotone: left out."""
    lm_head_VH = load_ends(target, final_TH.dtype, final_TH.device).lm_head_VH
    return float(((final_TH @ lm_head_VH.T).argmax(-1) == top1_T).float().mean())
