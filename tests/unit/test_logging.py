from __future__ import annotations

import contextlib
import json
import math
import os
import select
from pathlib import Path

import pytest

from transduce.logging import Log, TimeLeft, _PlainBar, duration
from transduce.metrics_log import MetricsFile


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
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


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert MetricsFile(tmp_path / "metrics.jsonl").read() == []


@pytest.mark.parametrize("damaged", [b"nonsense", b"\xff\xfe", b"3", b"[]", b"{}", b"", b'{"event": "upd'])
def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, damaged: bytes) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    good = b'{"event": "update", "update": 1}\n'
    file.path.write_bytes(good + damaged + b"\n" + good)
    assert len(file.read()) == 2
    assert file.truncate_after(1) == [f"{file.path}, line 2: damaged, left out"]
    assert file.path.read_bytes() == good + good
    assert file.truncate_after(1) == []


def test_time_left_counts_from_where_a_resumed_job_began() -> None:
    clock = iter([100.0, 110.0, 120.0]).__next__
    left = TimeLeft(clock)
    assert left(0.5) is None
    assert left(0.6) == pytest.approx(40)
    assert left(1.0) == pytest.approx(0)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (86_399, "23:59:59")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_come_every_ten_seconds_with_loss_speed_and_time_left() -> None:
    now, lines = [0.0], []
    bar = _PlainBar("training", lines.append, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        bar.update(second / 60, loss=2.0, tokens_per_second=1234.0)
    assert len(lines) == 3
    assert lines[-1] == "training  37%  loss 2.000  1,234 tokens/s  0:38 left"


def test_quiet_keeps_warnings_only(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        log = Log(quiet=True, stream=stream)
        log.say("hidden")
        log.warn("shown")
        with log.progress("training") as bar:
            bar.update(0.5, loss=1.0)
    assert (tmp_path / "log").read_text() == "warning: shown\n"


def test_a_stream_that_nobody_reads_stops_nothing() -> None:
    """A terminal that was closed: the training goes on, and saves."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as stream:
        Log(stream=stream).say("to nobody")
        Log(stream=stream).warn("to nobody")
        with contextlib.suppress(OSError):  # what the stream itself still holds
            stream.close()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_a_terminal_gets_a_bar_and_the_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        while select.select([ours], [], [], 1.0)[0]:  # a terminal hands its text over in parts
            shown += os.read(ours, 65536).decode("utf-8", errors="replace")
    os.close(ours)
    assert "a [line] with brackets" in shown and "loss 1.250" in shown and "1,000 tokens/s" in shown and "50%" in shown
