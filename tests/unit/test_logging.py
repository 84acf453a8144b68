"""Metrics, progress lines and errors: one line each, without what a terminal obeys."""

import contextlib
import io
import json
import math
import os
import select
import signal
from pathlib import Path

import pytest

from transduce.errors import Interrupted, is_out_of_memory, nearest
from transduce.logging import Bar, Log, duration, escape, plain_lines, print_error, print_exception
from transduce.metrics_log import MetricsFile
from transduce.process import call_c


def test_metrics_are_one_json_object_per_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"event": "start", "update": 0})
    file.append({"event": "update", "update": 1, "loss": math.nan, "words": ["ß", "\n", "\ud800"]})
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[-1] == ""
    assert json.loads(lines[1])["loss"] is None
    assert [event["event"] for event in file.read()] == ["start", "update"]


def test_a_resumed_run_repeats_no_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for update in range(5):
        file.append({"event": "update", "update": update})
    with file.path.open("a") as raw:
        raw.write('{"event": "upd')  # killed while it wrote
    file.truncate_after(2)
    file.append({"event": "update", "update": 3})
    assert [event["update"] for event in file.read()] == [0, 1, 2, 3]


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "metrics.jsonl").read() == []


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"nonsense", b"\xff\xfe", b"3", b"[]", b"{}", b"", b"[" * 100_000),
        *(b'{"event": "upd', b'{"event": "update", "update": "x"}'),
    ],
)
def test_a_damaged_line_is_reported_and_left_out(tmp_path: Path, damaged: bytes) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    good = b'{"event": "update", "update": 1}\n'
    file.path.write_bytes(good + damaged + b"\n" + good)
    assert len(file.read()) == 2
    assert file.truncate_after(1) == [f"{file.path}, line 2: damaged, left out"]
    assert file.path.read_bytes() == good + good
    assert file.truncate_after(1) == []


def test_time_left_counts_from_the_start_of_a_resumed_job() -> None:
    shown: list[str] = []
    bar = Bar(lambda fraction, text: shown.append(text), iter([100.0, 110.0, 120.0]).__next__)
    for fraction in (0.5, 0.6, 1.0):
        bar.update(fraction)
    assert shown == ["", "0:40 left", "0:00 left"]


def test_time_left_never_rises_if_the_job_has_a_time_limit() -> None:
    shown: list[str] = []
    bar = Bar(lambda fraction, text: shown.append(text), iter([0.0, 10.0, 20.0, 60.0, 70.0]).__next__)
    for fraction, at_most in ((0.0, 100.0), (0.1, 90.0), (0.3, 80.0), (0.4, 40.0), (0.8, 30.0)):
        bar.update(fraction, at_most=at_most)
    assert shown == ["1:40 left", "1:30 left", "0:47 left", "0:40 left", "0:17 left"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (86_399, "23:59:59")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_every_ten_seconds_with_loss_speed_and_time_left() -> None:
    now, lines = [0.0], []
    bar = Bar(plain_lines("training", lines.append, clock=lambda: now[0]), clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        bar.update(second / 60, loss=2.0, tokens_per_second=1234.0)
    assert len(lines) == 3
    assert lines[-1] == "training  37%  loss 2.000  1,234 tokens/s  0:38 left"


def test_a_quiet_log_shows_only_warnings(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        log = Log(quiet=True, stream=stream)
        log.say("hidden")
        log.warn("shown")
        with log.progress("training") as bar:
            bar.update(0.5, loss=1.0)
    assert (tmp_path / "log").read_text() == "warning: shown\n"


def test_a_closed_stream_does_not_stop_the_work() -> None:
    """A closed terminal: training continues, and saves."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        Log(stream=stream).say("unread")
        Log(stream=stream).warn("unread")
        with contextlib.suppress(OSError):  # the stream's own buffer
            stream.close()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_a_terminal_shows_a_bar_with_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        log = Log(stream=stream)
        assert log.is_terminal
        with log.progress("training") as bar:
            bar.update(0.25, loss=1.5, tokens_per_second=1000.0)
            log.say("a [line] with brackets")
            bar.update(0.5, loss=1.25, tokens_per_second=1000.0)
        shown = ""
        while select.select([ours], [], [], 1.0)[0]:  # a terminal returns its text in parts
            shown += os.read(ours, 65536).decode("utf-8", errors="replace")
    os.close(ours)
    assert "a [line] with brackets" in shown and "loss 1.250" in shown and "1,000 tokens/s" in shown and "50%" in shown


HOSTILE = "\x1b]0;owned\x07\x1b[2Jname\x9b31m\rover\b\x7f"
ESCAPED = r"\u001b]0;owned\u0007\u001b[2Jname\u009b31m\u000dover\u0008\u007f"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert escape(HOSTILE) == ESCAPED
    assert escape("gpj.\u202etxt\u2028") == r"gpj.\u202etxt\u2028"
    kept = "tabs\tand lines\n, Grüße, 猫\u3000, \u202bالعربية\u202c"
    assert escape(kept) == kept


def test_only_our_own_colours_pass_and_only_if_allowed() -> None:
    picture = "\x1b[48;5;17m  \x1b[0m"
    assert escape(f"{picture}{HOSTILE}", colours=True) == f"{picture}{ESCAPED}"
    assert "\x1b" not in escape(picture)


def test_log_lines_warnings_and_bars_are_escaped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    log = Log()
    log.say(HOSTILE)
    log.warn(HOSTILE)
    assert stream.getvalue() == f"{ESCAPED}\nwarning: {ESCAPED}\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with Log().progress(f"reading [red]{HOSTILE}") as bar:
        bar.update(0.5)
    assert "\x1b]0;" not in stream.getvalue() and "[red]" in stream.getvalue()


def test_errors_are_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(f"{HOSTILE}: cannot\nbe read")
    err = capsys.readouterr().err
    assert err.startswith("transduce: error: ") and err.endswith("cannot be read\n") and err.count("\n") == 1
    assert all(character.isprintable() for character in err.rstrip("\n"))
    print_error("x" * 5000)
    assert len(capsys.readouterr().err) < 2100


def test_exceptions_are_printed_without_characters_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("a\x1b[2J\x9b 猫")
    except ValueError as error:
        print_exception(error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == r"ValueError: a\u001b[2J\u009b 猫"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
    ids=str,
)
def test_out_of_memory_errors_of_every_library_are_recognised(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_an_interrupted_run_exits_with_the_shells_code() -> None:
    assert Interrupted("stopped", signal=signal.SIGTERM).exit_code == 143


def test_nearest_suggests_only_similar_names() -> None:
    assert nearest("xyz", ["dropout"]) == ""


def test_c_functions_are_not_looked_up_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, `ctypes.CDLL(None)` raises a TypeError."""
    call_c("no_such_function")
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("ctypes.CDLL was called"))
    call_c("mallopt", -4, 0)
