from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from transduce.process import exit_on_signals
from transduce.training.stopping import Stopper, StopRequest, score_of, stop_on_signals


def test_bleu_decides_and_loss_breaks_ties() -> None:
    assert score_of({"loss": 2.0, "bleu": 30.0}, "bleu") > score_of({"loss": 1.0, "bleu": 29.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "bleu") > score_of({"loss": 2.0, "bleu": 0.0}, "bleu")
    assert score_of({"loss": 1.0, "bleu": 0.0}, "loss") > score_of({"loss": 2.0, "bleu": 9.0}, "loss")
    assert score_of({"loss": 1.0}, "bleu") > score_of({"loss": 2.0}, "bleu")


def test_patience_counts_validations_since_the_best() -> None:
    stopper = Stopper(by="loss", patience=2)
    seen = [(stopper.see(update, {"loss": loss}), stopper.exhausted) for update, loss in enumerate((3, 2, 4, 1, 1, 5))]
    assert seen == [(True, False), (True, False), (False, False), (True, False), (False, False), (False, True)]
    assert (stopper.best_update, stopper.since) == (3, 2)


def test_no_patience_never_stops() -> None:
    stopper = Stopper(by="loss", patience=0)
    for update in range(50):
        stopper.see(update, {"loss": float(update)})
    assert not stopper.exhausted


def test_the_state_survives_json() -> None:
    stopper = Stopper(by="bleu", patience=3)
    for state in (stopper.state(), stopper.see(7, {"loss": 1 / 3, "bleu": 20.1}) and stopper.state()):
        other = Stopper(by="bleu", patience=3)
        other.load(json.loads(json.dumps(state)))
        assert other.state() == state
        assert not other.see(8, {"loss": 9.0, "bleu": 20.0}) or other.best == (20.0, -9.0)


def test_the_first_signal_sets_the_request_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    said: list[str] = []
    with stop_on_signals(said.append) as request:
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        signal.getsignal(signal.SIGTERM)  # Python runs the handler between two byte codes
        assert request
        assert request.name == "SIGTERM"
    assert len(said) == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_repeated_sighups_set_the_request_once() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with stop_on_signals(lambda text: None) as request:
        for _ in range(3):  # from the kernel, from the shell
            os.kill(os.getpid(), signal.SIGHUP)
            signal.getsignal(signal.SIGHUP)
        assert request.name == "SIGHUP"
    assert signal.getsignal(signal.SIGHUP) is before


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
from transduce.training.stopping import stop_on_signals
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
