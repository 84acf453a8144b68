import os
import signal
import subprocess
import sys
import threading

import pytest

from transduce.errors import Interrupted
from transduce.process import exit_on_signals
from transduce.training.loop import StopRequest, stop_on_signals


def test_the_first_signal_sets_the_request_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with stop_on_signals(said.append) as request:
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        signal.getsignal(signal.SIGTERM)  # Python runs the handler between two byte codes
        assert request
        assert request.number == signal.SIGTERM
    assert len(said) == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_repeated_sighups_set_the_request_once() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_on_signals(lambda text: None) as request:
        for _ in range(3):  # from the kernel, from the shell
            os.kill(os.getpid(), signal.SIGHUP)
            signal.getsignal(signal.SIGHUP)
        assert request.number == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_signal_interrupts_what_can_be_repeated(when: str) -> None:
    with (
        stop_on_signals(lambda text: None) as request,
        pytest.raises(Interrupted, match="SIGTERM"),
    ):
        if when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        with request.interrupting(lambda number: Interrupted(signal.Signals(number).name, signal=number)):
            if when == "during":
                os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("not interrupted")


def test_a_signal_after_that_only_sets_the_request() -> None:
    with stop_on_signals(lambda text: None) as request:
        with request.interrupting(lambda number: Interrupted("too late", signal=number)):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGTERM


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(lambda text: None) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            signal.getsignal(signal.SIGHUP)
            assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_training_handles_ignored_signals() -> None:
    """Other commands leave them ignored, as for background jobs of a script."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with exit_on_signals():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with stop_on_signals(lambda text: None):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_second_signal_ends_the_process_at_once() -> None:
    code = """
import os, signal, sys, time
from transduce.training.loop import stop_on_signals
with stop_on_signals(lambda text: print(text, flush=True)):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
    print("never", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGINT
    assert "still here" in done.stdout
    assert "never" not in done.stdout


def test_other_threads_do_not_change_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[StopRequest] = []

    def work() -> None:
        with stop_on_signals(print) as request:
            seen.append(request)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not seen[0]
    assert signal.getsignal(signal.SIGINT) is before
