"""API keys of a service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transduce.errors import SettingsError
from transduce.serving.keys import ApiKeys, UnauthorizedError, new_key
from transduce.serving.limits import OverloadedError


def test_a_key_has_a_limit_of_requests_per_minute(tmp_path: Path) -> None:
    (secret, line), now = new_key("alice"), 100.0
    (tmp_path / "keys").write_text(f"# keys\n\n{line} 2\n", encoding="utf-8")
    keys = ApiKeys(tmp_path / "keys", clock=lambda: now)
    assert [keys.check(secret) for _ in range(2)] == ["alice"] * 2
    with pytest.raises(OverloadedError, match="more than 2 requests per minute") as refused:
        keys.check(secret)
    assert refused.value.retry_after == 30
    now += 30
    assert keys.check(secret) == "alice"
    for wrong in (None, "", secret + "x", "\ud800"):
        with pytest.raises(UnauthorizedError):
            keys.check(wrong)


def test_what_a_key_has_used_counts_when_the_file_is_read_again(tmp_path: Path) -> None:
    (secret, line), path = new_key("alice"), tmp_path / "keys"
    path.write_text(f"{line} 2\n", encoding="utf-8")
    keys = ApiKeys(path, clock=lambda: 100.0)
    for _ in range(2):
        keys.check(secret)
    for seconds, per_minute in enumerate((2, 5), 1):
        path.write_text(f"{line} {per_minute}\n", encoding="utf-8")
        os.utime(path, (seconds, seconds))
        with pytest.raises(OverloadedError, match=f"more than {per_minute} requests per minute"):
            keys.check(secret)


def test_a_changed_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    (first, line), (second, other) = new_key("alice"), new_key("bob")

    def write(text: str, seconds: int) -> None:
        path.write_text(text, encoding="utf-8")
        os.utime(path, (seconds, seconds))

    write(f"{line}\n", 1)
    keys = ApiKeys(path)
    with pytest.raises(UnauthorizedError):
        keys.check(second)
    write(f"{line}\n{other}\n", 2)
    assert (keys.check(first), keys.check(second)) == ("alice", "bob")
    write("damaged", 3)
    assert (keys.check(first), keys.check(second)) == ("alice", "bob")
    path.unlink()
    assert keys.check(first) == "alice"
    log = capsys.readouterr().err
    assert log.count("stay as they were") == 2 and "keys:1" in log
    write(f"{other}\n", 4)
    with pytest.raises(UnauthorizedError):
        keys.check(first)
    write("", 5)
    with pytest.raises(UnauthorizedError):
        keys.check(second)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# nothing\n", "contains no key; make one"),
        *((f"# keys\n{line}\n", "keys:2: not a key; a line is NAME SHA256") for line in (
            "alice", f"alice {'0' * 63}", f"alice {'x' * 64}", f"alice {'0' * 64} 0", f"alice {'0' * 64} many",
            f"alice {'0' * 64} nan", f"alice {'0' * 64} 5 6", f"alice {'0' * 64} 0.5")),
    ],
)  # fmt: skip
def test_bad_files_of_keys(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        ApiKeys(tmp_path / "keys")
