"""Memory that was freed, and that the C library keeps for what is asked next."""

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Hand free pages of the heap back to the system. glibc alone keeps that many; elsewhere nothing happens."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
