#!/usr/bin/env python3
"""The store's size and speed: each codec against one bf16 file a sample, as other trainers keep states, and against the machine's limits.

    python tools/bench_store.py [--hidden H] [--tokens N] [--readers 1 2 4] [--folder DIR] [--json FILE]

Made-up states (outlier channels among them) of documents of 50 to 450 tokens; `final` alone is what an mtp head needs, four captures what
an eagle3 head does. Reading means: a document's states in bf16 in memory of one's own, documents in random order, one thread. `first` also
checks every file's hash; `cold` has the system's file cache emptied of the store's files. Limits: copying memory, and writing and reading
one large file in order. A file a sample is written as others do, without asking that it be on the disk.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench import save, write_store
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtptrain.data.documents import TRAIN, Document
from mtptrain.store.codecs import CODECS
from mtptrain.store.reader import Store

CAPTURES = {"mtp": ["final"], "eagle3": ["final", "after_1", "after_14", "after_26"]}
_SHARD_TOKENS = 65536
_READ_SECONDS = 2.0
States = Callable[[Document, str], Tensor]
"""Of a document at a capture."""


def made_up(tokens: int, hidden: int) -> tuple[list[Document], States]:
    """Documents, and the states of one at a capture."""
    rng, documents, total = random.Random(0), [], 0
    while total < tokens:
        length = rng.randint(50, 450)
        ids = [rng.randrange(49152) for _ in range(length)]
        documents.append(Document(id=f"d{len(documents)}", source="s", split=TRAIN, tokens=ids, spans=[(length // 3, length)]))
        total += length
    size_H = torch.randn(hidden, generator=torch.Generator().manual_seed(0)).exp()

    starts = dict(zip([d.id for d in documents], accumulate([0, *(len(d.tokens) for d in documents)]), strict=False))
    every: dict[str, Tensor] = {}

    def state(document: Document, capture: str) -> Tensor:
        if capture not in every:
            generator = torch.Generator().manual_seed(len(every))
            every[capture] = (torch.randn(total, hidden, generator=generator) * size_H).bfloat16()
        return every[capture][starts[document.id] : starts[document.id] + len(document.tokens)]

    return documents, state


def code_speed(codec: str, hidden: int, threads: int) -> dict[str, float]:
    """GB/s of bf16 states, encoded a shard at a time and decoded 256 tokens at a time."""
    torch.set_num_threads(threads)
    state_NH = torch.randn(_SHARD_TOKENS, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    coder, size = CODECS[codec], state_NH.numel() * 2 / 1e9
    tensors = coder.encode(state_NH)
    rows = range(0, len(state_NH), 256)
    target_TH = torch.empty(256, hidden, dtype=torch.bfloat16)
    encoded, decoded = [], []
    for _ in range(3):
        began = time.perf_counter()
        coder.encode(state_NH)
        encoded.append(size / (time.perf_counter() - began))
        began = time.perf_counter()
        for start in rows:
            target_TH.copy_(coder.decode(tensors, start, start + 256))
        decoded.append(size / (time.perf_counter() - began))
    return {"encode": statistics.median(encoded), "decode": statistics.median(decoded)}


def write_samples(folder: Path, documents: list[Document], state: States, captures: list[str]) -> float:
    folder.mkdir()
    seconds = 0.0
    for d in documents:
        states = torch.cat([state(d, c) for c in captures], dim=1)
        mask = torch.zeros(len(d.tokens), dtype=torch.int64)
        mask[d.spans[0][0] :] = 1
        began = time.perf_counter()
        save_file({"hidden_states": states, "input_ids": torch.tensor(d.tokens), "loss_mask": mask}, folder / f"{d.id}.safetensors")
        seconds += time.perf_counter() - began
    return seconds


class StoreReader:
    def __init__(self, folder: Path, captures: list[str]) -> None:
        began = time.perf_counter()
        self.store, self.captures = Store.open(folder, captures), captures
        self.open_seconds = time.perf_counter() - began
        self.count = len(self.store.entries)

    def read(self, i: int) -> int:
        rows = [torch.empty_like(s).copy_(s) for s in (self.store.state(i, c) for c in self.captures)]
        return len(rows[0])


class SampleReader:
    def __init__(self, folder: Path, captures: list[str]) -> None:
        self.files = sorted(folder.iterdir())
        self.count = len(self.files)

    def read(self, i: int) -> int:
        with safe_open(self.files[i], "pt") as f:
            return len(f.get_tensor("hidden_states").clone())


Reader = type[StoreReader] | type[SampleReader]


def passed(kind: Reader, folder: Path, captures: list[str], seconds: float, seed: int) -> dict[str, float]:
    """A first pass over all documents, then random ones for `seconds`: tokens a second of both, and milliseconds a document."""
    torch.set_num_threads(1)
    reader = kind(folder, captures)
    order = list(range(reader.count))
    random.Random(seed).shuffle(order)
    began = time.perf_counter()
    tokens = sum(reader.read(i) for i in order)
    first = tokens / (time.perf_counter() - began)
    tokens, times = 0, []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        i = order[len(times) % len(order)]
        began = time.perf_counter()
        tokens += reader.read(i)
        times.append(time.perf_counter() - began)
    warm = {"warm": tokens / sum(times), "document_ms": statistics.median(times) * 1000} if times else {}
    return {"first": first, **warm}


def at_once(pool: ProcessPoolExecutor, count: int, *arguments: Any) -> list[dict[str, float]]:
    """`passed` in `count` processes, which are running already."""
    return [task.result() for task in [pool.submit(passed, *arguments, seed) for seed in range(count)]]


def forget(folder: Path) -> None:
    """Take the folder's files out of the system's file cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def limits(folder: Path) -> dict[str, float]:
    """GB/s of copying memory by one thread (bytes read), of writing a large file to the disk itself, and of reading it uncached."""
    torch.set_num_threads(1)
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        rates.append(source.numel() / 1e9 / (time.perf_counter() - began))
    large = folder / "large" / "file"
    large.parent.mkdir()
    began = time.perf_counter()
    with open(large, "wb") as f:
        f.write(memoryview(source.numpy()))
        os.fsync(f.fileno())
    written = source.numel() / 1e9 / (time.perf_counter() - began)
    forget(large.parent)
    began = time.perf_counter()
    with open(large, "rb", buffering=0) as f:
        while f.read(1 << 22):
            pass
    disk = source.numel() / 1e9 / (time.perf_counter() - began)
    shutil.rmtree(large.parent)
    return {"memory_gb_per_second": statistics.median(rates), "disk_write_gb_per_second": written, "disk_read_gb_per_second": disk}


def measure(
    pool: ProcessPoolExecutor, folder: Path, kind: Reader, captures: list[str], tokens: int, written: float, readers: Sequence[int]
) -> dict[str, Any]:
    size = sum(p.stat().st_size for p in folder.iterdir())
    (one,) = at_once(pool, 1, kind, folder, captures, _READ_SECONDS)
    forget(folder)
    cold = at_once(pool, 1, kind, folder, captures, 0.0)[0]["first"]
    several = {n: sum(r["warm"] for r in at_once(pool, n, kind, folder, captures, _READ_SECONDS)) for n in readers}
    return {
        "bytes_per_token": size / tokens,
        "files_per_million_tokens": len(list(folder.iterdir())) / tokens * 1e6,
        "write_tokens_per_second": tokens / written,
        "read_first": one["first"],
        "read_cold": cold,
        "read_warm": one["warm"],
        "read_warm_gb_per_second": one["warm"] * size / tokens / 1e9,
        "document_ms": one["document_ms"],
        "readers": several,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, help="where to write; the system's folder for temporary files without it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    most = max(arguments.readers)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as scratch,
        ProcessPoolExecutor(most, mp_context=get_context("spawn")) as pool,
    ):
        root, threads = Path(scratch), torch.get_num_threads()
        list(pool.map(time.sleep, [1.0] * most))  # so that all are there, and torch with them
        found["limits"] = limits(root)
        found["codecs"] = {
            f"{codec}, threads: {n}": code_speed(codec, arguments.hidden, n) for codec in CODECS for n in sorted({1, threads})
        }
        documents, state = made_up(arguments.tokens, arguments.hidden)
        tokens = sum(len(d.tokens) for d in documents)
        for head, captures in CAPTURES.items():
            rows = found[head] = {}
            written = write_samples(root / "samples", documents, state, captures)
            rows["a file a sample, bf16"] = measure(pool, root / "samples", SampleReader, captures, tokens, written, arguments.readers)
            shutil.rmtree(root / "samples")
            for codec in CODECS:
                folder, coder = root / f"{head}-{codec}", CODECS[codec]
                written = write_store(
                    folder,
                    {"made": "for a benchmark"},
                    (coder, coder),
                    documents,
                    _SHARD_TOKENS,
                    lambda members, wanted=captures: {c: torch.cat([state(documents[i], c) for i in members]) for c in wanted},
                )
                rows[f"store, {codec}"] = measure(pool, folder, StoreReader, captures, tokens, written, arguments.readers)
                shutil.rmtree(folder)
    _print(found, arguments.readers)
    save(found, arguments.json)


def _print(found: dict[str, Any], readers: Sequence[int]) -> None:
    print("limits: " + ", ".join(f"{name.replace('_', ' ')} {rate:.2f}" for name, rate in found["limits"].items()))
    print("\n| codec | encodes GB/s of bf16 | decodes |\n|---|---|---|")
    for name, speed in found["codecs"].items():
        print(f"| {name} | {speed['encode']:.2f} | {speed['decode']:.2f} |")
    names = ", ".join(map(str, readers))
    print(
        "\n| | bytes a token | files a million tokens | written tokens/s | read: first | cold | warm | warm GB/s | a document, ms "
        f"| {names} readers, tokens/s |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for head in CAPTURES:
        for name, row in found[head].items():
            several = " / ".join(f"{rate:,.0f}" for rate in row["readers"].values())
            print(
                f"| {head}: {name} | {row['bytes_per_token']:,.0f} | {row['files_per_million_tokens']:,.0f} | "
                f"{row['write_tokens_per_second']:,.0f} | {row['read_first']:,.0f} | {row['read_cold']:,.0f} | {row['read_warm']:,.0f} | "
                f"{row['read_warm_gb_per_second']:.2f} | {row['document_ms']:.2f} | {several} |"
            )


if __name__ == "__main__":
    main()
