"""Vocabularies smaller than the target's, chosen from what the training split supervises."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.stages.context import Context
from mtptrain.store.reader import Store
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids


def supervised_counts(store: Store, documents: Sequence[int]) -> dict[str, Counter[int]]:
    """How often each id occurs in the documents' spans, by source."""
    counts: dict[str, Counter[int]] = {}
    for i in documents:
        entry, tokens = store.entries[i], store.tokens(i).tolist()
        of_source = counts.setdefault(entry.source, Counter())
        for start, end in entry.spans:
            of_source.update(tokens[start:end])
    return counts


def most_frequent(counts: Counter[int], size: int, kept: Iterable[int]) -> list[int]:
    """At most `size` ids that occur, the most frequent ones (of equals the lower id), and all of `kept` beside them; ascending."""
    ranked = sorted((t for t in counts if counts[t]), key=lambda t: (-counts[t], t))
    chosen = set(kept)
    room = max(size - len(chosen), 0)
    chosen.update([t for t in ranked if t not in chosen][:room])
    return sorted(chosen)


def special_ids(cfg: Config, context: Context) -> set[int]:
    """End-of-turn ids, and every special id of the tokenizer that the target's vocabulary has."""
    tokenizer = load_tokenizer(context.folder, cfg.target.trust_remote_code)
    ids = {*tokenizer.all_special_ids, *stop_token_ids(context.folder, tokenizer), *context.spec.eos_token_ids}
    return {i for i in ids if i < context.spec.vocab_size}


def draft_vocabulary(cfg: Config, context: Context, store: Store, documents: Sequence[int]) -> Tensor | None:
    """Ids an eagle3 head may draft, int64 ascending; None: all. Printed: their share of each source's tokens, held-out ones apart.

    UserError where only special ids fit.
    """
    size = cfg.head.draft_vocabulary
    if size is None:
        return None
    by_source = supervised_counts(store, documents)
    counts = sum(by_source.values(), Counter())
    special = special_ids(cfg, context)
    ids = most_frequent(counts, size, special)
    if len(ids) == len(special):
        raise UserError(f"head.draft_vocabulary={size}: leaves no room beside the tokenizer's {len(special)} special ids; ask for more")
    if len(ids) == context.spec.vocab_size:
        return None
    held_out = supervised_counts(store, store.indices("held_out"))
    print(
        f"train: the head drafts {len(ids):,} of {context.spec.vocab_size:,} ids ({len(counts):,} occur); they cover "
        f"{_shares(by_source, ids)} of supervised tokens, {_shares(held_out, ids)} of held-out ones",
        flush=True,
    )
    return torch.tensor(ids)


def _shares(by_source: dict[str, Counter[int]], ids: Sequence[int]) -> str:
    """Of all tokens, and of each source's."""
    each = ", ".join(f"{source} {covered(counts, ids):.1%}" for source, counts in sorted(by_source.items()))
    return f"{covered(sum(by_source.values(), Counter()), ids):.1%} ({each})"


def loss_vocabulary(cfg: Config, context: Context, store: Store, documents: Sequence[int]) -> Tensor | None:
    """Ids `train.loss.vocabulary` takes the loss over, and the end markers; None: all."""
    size = cfg.train.loss.vocabulary
    if size is None or size >= context.spec.vocab_size:
        return None
    counts = sum(supervised_counts(store, documents).values(), Counter())
    ids = sorted({*most_frequent(counts, size, ()), *context.spec.eos_token_ids})
    print(
        f"train: the loss is taken over {len(ids):,} of {context.spec.vocab_size:,} ids ({covered(counts, ids):.1%} of supervised tokens)",
        flush=True,
    )
    return torch.tensor(ids)


def covered(counts: Counter[int], ids: Sequence[int]) -> float:
    """Share of the counted tokens that are among `ids`."""
    return sum(counts[t] for t in ids) / max(counts.total(), 1)
