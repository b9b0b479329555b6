"""Do the lengths in a GGUF's header fit into its file? The readers there are trust them: with one byte changed they fill all memory.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import BinaryIO

_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of a value of each type; but for strings and arrays."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 8
_MOST_NESTED = 4


def check_header(path: Path) -> None:
    """ValueError where metadata and the table of tensors do not end within the file."""
    with open(path, "rb") as f:
        _Header(f, path.stat().st_size).check()


class _Header:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def check(self) -> None:
        if self.file.read(4) != b"GGUF" or self._number("<I") not in (2, 3):
            raise ValueError("not a GGUF of version 2 or 3")
        tensors, entries = self._count(24), self._count(13)
        for _ in range(entries):
            self._string()
            self._value(self._number("<I"), 0)
        for _ in range(tensors):
            self._string()
            if (dimensions := self._number("<I")) > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            self._skip(8 * dimensions + 12)

    def _value(self, kind: int, depth: int) -> None:
        if kind in _BYTES:
            self._skip(_BYTES[kind])
        elif kind == _STRING:
            self._string()
        elif kind == _ARRAY and depth < _MOST_NESTED:
            inner = self._number("<I")
            count = self._count(_BYTES.get(inner, 8))
            if inner in _BYTES:
                self._skip(count * _BYTES[inner])
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise ValueError(f"metadata of unknown type {kind}")

    def _string(self) -> None:
        self._skip(self._count(1))

    def _count(self, least_bytes: int) -> int:
        """Of things that take that many bytes each at least."""
        count = self._number("<Q")
        if count * least_bytes > self.size - self.file.tell():
            raise ValueError(f"{count} things are announced where {self.size - self.file.tell()} bytes are left")
        return count

    def _number(self, form: str) -> int:
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise ValueError("it ends within its header")
        return int(struct.unpack(form, data)[0])

    def _skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ValueError("it ends within its header")
        self.file.seek(count, 1)
