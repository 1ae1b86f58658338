"""Signals to a command that has started a launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading

import psutil
import pytest

from avgpipe_ds.launching import _run, _signals_end_it

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"


def test_under_nohup_a_hangup_ends_nothing() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals_end_it():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_leave_processes_behind(again: signal.Signals) -> None:
    """The child does not end when it is asked to, and the second signal comes while it is waited for."""
    timers = [threading.Timer(wait_s, os.kill, (os.getpid(), number)) for wait_s, number in ((2, signal.SIGTERM), (4, again))]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt), _signals_end_it():
        _run([sys.executable, "-c", STUBBORN])
    for timer in timers:
        timer.join()
    left = [
        child for child in psutil.Process().children() if STUBBORN in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
    ]
    assert left == []
