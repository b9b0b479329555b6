"""A store file mapped into memory, whose pages can be handed back after they were read."""

import json
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""What the store's codecs write, by safetensors' names."""


class MappedFile:
    """`tensors` are views of a safetensors file, not to be written to. Its header has been checked before."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as f:
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of memory that can't be written to
        start = 8 + int.from_bytes(self._map[:8], "little")
        header = json.loads(self._map[8:start])
        self.tensors = {name: self._view(entry, start) for name, entry in header.items() if name != "__metadata__"}

    def _view(self, entry: dict[str, Any], start: int) -> Tensor:
        dtype = _DTYPES[entry["dtype"]]
        first, last = entry["data_offsets"]
        if first == last:
            return torch.empty(entry["shape"], dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=(last - first) // dtype.itemsize, offset=start + first).view(entry["shape"])

    def release(self) -> None:
        """Take what was read off the process's memory; it stays in the system's file cache and comes back when it is read again."""
        if hasattr(self._map, "madvise"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)
