"""Signals: raised at once outside work that must not be cut, noted inside it, and put back afterwards."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mtptrain.signals import Interrupted, check, deferred, exit_status, handled


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_raised_where_the_program_is(number: int, status: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as raised, handled():
        os.kill(os.getpid(), number)
    assert raised.value.number == number
    assert exit_status(raised.value) == status
    assert signal.getsignal(number) is before


def _work(done: list[str], *signals: int) -> None:
    with handled(), deferred():
        for number in signals:
            os.kill(os.getpid(), number)
        done.append("the update")
        check()
        done.append("another")


def test_inside_deferred_it_waits_for_check() -> None:
    done: list[str] = []
    with pytest.raises(Interrupted) as raised:
        _work(done, signal.SIGTERM)
    assert done == ["the update"]
    assert raised.value.number == signal.SIGTERM
    check()  # it was heard


def test_a_second_signal_does_not_wait_and_is_no_interruption_to_save_after() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt) as raised:
        _work(done, signal.SIGINT, signal.SIGINT)
    assert not done
    assert not isinstance(raised.value, Interrupted)
    assert exit_status(raised.value) == 130


def test_another_thread_may_work_without_signals() -> None:
    seen = []

    def work() -> None:
        with handled(), deferred():
            check()
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_the_exit_status_of_a_command_that_was_terminated() -> None:
    code = (
        "import os, signal, sys\nfrom mtptrain import cli\n"
        "def main(cfg): os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(cli.run(main, 'train', ['+recipe=tiny']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 143
    assert done.stderr.strip().splitlines()[-1] == "interrupted; the same command continues where it stopped"
