"""Ending early on SIGINT (Ctrl-C) and SIGTERM (a scheduler, `docker stop`): at a point where nothing is half done.

Outside of `deferred` a signal raises `Interrupted` where the program is; what is on disk is whole at any time.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_noted: list[int] = []
_together = False


class Interrupted(KeyboardInterrupt):
    """By signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """What shells and schedulers expect of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)


@contextmanager
def handled() -> Iterator[None]:
    """Inside, both signals raise `Interrupted`. In another thread than the main one nothing changes."""
    with _handler(_raise):
        yield


@contextmanager
def handlers_kept() -> Iterator[None]:
    """What handles signals before this handles them after it again, whatever a library sets inside."""
    with ExitStack() as restored:
        for number in (*_SIGNALS, signal.SIGHUP, signal.SIGQUIT):
            restored.callback(signal.signal, number, signal.getsignal(number))
        yield


@contextmanager
def deferred(together: bool = False) -> Iterator[None]:
    """Inside, a signal is noted, for `check` to raise where the work may end. A second one raises a plain KeyboardInterrupt at once.

    `together`: several processes are at work, which must end at the same point: `check` raises nothing, they agree on what is `noted`.
    """
    global _together
    _noted.clear()
    _together = together
    try:
        with _handler(_note):
            yield
    finally:
        _noted.clear()
        _together = False


def noted() -> int | None:
    """The signal that came, if one did."""
    return _noted[0] if _noted else None


def check() -> None:
    """Raise `Interrupted` if a signal came; called where nothing is half done."""
    if _noted and not _together:
        raise Interrupted(_noted[0])


def _note(number: int, frame: FrameType | None) -> None:
    if _noted:
        raise KeyboardInterrupt
    _noted.append(number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


@contextmanager
def _handler(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
