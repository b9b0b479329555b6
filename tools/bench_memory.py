#!/usr/bin/env python3
"""Peak memory of a training step, against what a step must hold, and how it grows with tokens and vocabulary.

    python tools/bench_memory.py [--hidden N] [--vocabulary N] [--tokens N] [--json FILE]
    python tools/bench_memory.py --long 8192,32768 --hidden 64 --vocabulary 1000 --tokens 1024

A random target of the given sizes, one packed batch, three draft steps, forward, backward and optimizer, each size in a process of its own;
what a process holds before it reads the target is subtracted. What a step must hold, in its dtype: the target's embeddings and lm_head,
the head's weights, gradients and two moments, and of every row and draft step what the layer's backward reads. The defaults are
V=152k and H=4096 divided by 16, 16k tokens and the loss's chunk halved.

`--long`: one document of so many tokens instead, trained in windows of `--tokens`; what must grow with it are its states, and keys and
values with their gradients.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench import apart, save, write_store

from mtptrain.cli import compose
from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.heads.layers import LayerConfig
from mtptrain.peak import peak_bytes
from mtptrain.stages.context import open_context, open_store
from mtptrain.stages.first_weights import initial_head
from mtptrain.stages.train import make_trainer, training_documents
from mtptrain.store.codecs import BF16
from mtptrain.target.tiny import make_tiny_target

_DOCUMENT = 512
_HEAD_DIM = 32
_CHUNK = 256
"""Rows of logits held at once; 512 is the default, for twice the tokens."""
_INTERMEDIATE = 3.5
"""Times hidden, as in an 8B Llama."""


def floats_of_a_row(shape: LayerConfig) -> int:
    """What backward reads of one row at one draft step: the inputs of its products and of what is not linear.

    Embedding and state, their norms and the fused row (5 H); the normed row that q, k, v read (H); q, k, v and the mixed values; the
    residual and its norm (2 H); gate, up and their product (3 I); the layer's and the norm's output (2 H); the state's gradient (H).
    """
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 11 * shape.hidden_size + heads + 3 * shape.intermediate_size


def step(sizes: dict[str, int], overrides: list[str]) -> dict[str, Any]:
    """One update: bytes above what the process held before, and what it must hold."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape = {
            "hidden_size": sizes["hidden"],
            "intermediate_size": int(_INTERMEDIATE * sizes["hidden"]),
            "num_attention_heads": sizes["hidden"] // _HEAD_DIM,
            "num_key_value_heads": max(1, sizes["hidden"] // _HEAD_DIM // 4),
            "head_dim": _HEAD_DIM,
            "vocab_size": sizes["vocabulary"],
        }
        target = make_tiny_target(root / "target", **shape)
        own = [
            f"root={root}",
            f"target.path={target}",
            f"train.batch_tokens={sizes['tokens']}",
            "train.epochs=1",
            "head.init=random",
            f"train.loss.chunk_rows={_CHUNK}",
        ]
        own += [f"target.shape.{key}={value}" for key, value in shape.items()]
        cfg = compose(["+recipe=tiny", "head=mtp", *own, *overrides])[0]
        _random_store(cfg.store_dir, sizes)
        base = peak_bytes()
        context = open_context(cfg)
        store = open_store(cfg, ["final"])
        documents = training_documents(store)
        head = initial_head(cfg, context, store, documents)
        trainer = make_trainer(cfg, context, store, documents, head, lambda _: {}, lambda _: None)
        trainer.update(trainer.updates[0])
        peak = peak_bytes() - base
    weights = sum(p.numel() for p in head.parameters())
    width = context.dtype.itemsize
    must = 16 * weights + 2 * sizes["vocabulary"] * sizes["hidden"] * width
    must += sizes["tokens"] * cfg.train.steps * floats_of_a_row(head.layer.config) * width
    of_layer = head.layer.config
    must += sizes.get("document", 0) * (of_layer.hidden_size * (width + 2) + 2 * of_layer.num_kv_heads * of_layer.head_dim * (width + 4))
    logits = 4 * cfg.train.loss.chunk_rows * sizes["vocabulary"]
    return {"peak_bytes_of_step": peak, "must_bytes": must, "ratio": peak / must, "logits_of_a_chunk": logits}


def _random_store(folder: Path, sizes: dict[str, int]) -> None:
    """One shard of documents of equal length, all but one of them for training; every token is supervised."""
    random = torch.Generator().manual_seed(0)
    long = sizes.get("document")
    lengths = [_DOCUMENT, long] if long else [_DOCUMENT] * (1 + sizes["tokens"] // _DOCUMENT)
    documents = [
        Document(
            id=f"{i}",
            source="random",
            split=HELD_OUT if i == 0 else TRAIN,
            tokens=torch.randint(sizes["vocabulary"], (length,), generator=random).tolist(),
            spans=[(0, length)],
        )
        for i, length in enumerate(lengths)
    ]
    write_store(
        folder,
        {"made": "at random"},
        (BF16, BF16),
        documents,
        max(sizes["tokens"], long or 0) + _DOCUMENT,
        lambda members: {"final": torch.randn(sum(lengths[i] for i in members), sizes["hidden"], generator=random).bfloat16()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=9500)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--long", default="", help="tokens of one document, with commas between")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    size = {"hidden": arguments.hidden, "vocabulary": arguments.vocabulary, "tokens": arguments.tokens}
    every = [size, size | {"tokens": size["tokens"] // 2}, size | {"vocabulary": 4 * size["vocabulary"]}]
    if arguments.long:
        every = [size | {"document": int(tokens)} for tokens in arguments.long.split(",")]
    found = []
    print("| hidden | vocabulary | tokens | peak of a step | must hold | ratio | logits of the whole batch, not held |")
    print("|---|---|---|---|---|---|---|")
    for sizes in every:
        row = sizes | apart(step, sizes, overrides)
        found.append(row)
        tokens = sizes.get("document", sizes["tokens"])
        whole = 4 * 3 * tokens * sizes["vocabulary"]
        print(
            f"| {sizes['hidden']} | {sizes['vocabulary']:,} | {tokens:,} | {row['peak_bytes_of_step'] / 1e6:,.0f} MB | "
            f"{row['must_bytes'] / 1e6:,.0f} MB | {row['ratio']:.2f} | {whole / 1e6:,.0f} MB |",
            flush=True,
        )
    save({"sizes": found}, arguments.json)


if __name__ == "__main__":
    main()
