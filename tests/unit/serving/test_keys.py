"""API keys of a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.errors import SettingsError
from transduce.serving.keys import ApiKeys, UnauthorizedError, new_key
from transduce.serving.limits import OverloadedError


def test_a_key_has_a_limit_of_requests_per_minute(tmp_path: Path) -> None:
    (secret, line), now = new_key("alice"), 100.0
    (tmp_path / "keys").write_text(f"# keys\n\n{line} 2\n", encoding="utf-8")
    keys = ApiKeys(tuple(ApiKeys.load(tmp_path / "keys")._keys.values()), clock=lambda: now)
    assert [keys.check(secret) for _ in range(2)] == ["alice"] * 2
    with pytest.raises(OverloadedError, match="more than 2 requests per minute") as refused:
        keys.check(secret)
    assert refused.value.retry_after == 30
    now += 30
    assert keys.check(secret) == "alice"
    for wrong in (None, "", secret + "x", "\ud800"):
        with pytest.raises(UnauthorizedError):
            keys.check(wrong)


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
        ApiKeys.load(tmp_path / "keys")
