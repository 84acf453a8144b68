"""API keys and glossaries of a service."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from transduce.errors import SettingsError, UserError
from transduce.runs.atomic import write_json
from transduce.serving.access import ApiKeys, OverloadedError, UnauthorizedError, new_key
from transduce.serving.glossaries import (
    LONGEST_TERM,
    MOST_ENTRIES,
    MOST_GLOSSARIES,
    Glossaries,
    Glossary,
    StorageError,
    UnknownGlossaryError,
    parse_entries,
)


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


def test_glossaries_outlive_the_process_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    kept = Glossaries(path)
    one, two = (kept.create(name, "EN", "de", {"hat": "Hut"}) for name in "ab")
    kept.delete(one.id)
    with pytest.raises(UnknownGlossaryError):
        kept.delete(one.id)
    del kept
    again = Glossaries(path)
    assert again.all() == [two] and again.find(two.id) == two
    assert again.terms(two.id, "en-GB", "DE") == {"hat": "Hut"}
    with pytest.raises(SettingsError, match="is for en-de, not de-en"):
        again.terms(two.id, "de", "en")
    del again
    for damaged in ("{", "[]", '{"glossaries": [{"id": 1}]}'):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(UserError, match=r"glossaries.json is damaged"):
            Glossaries(path)


def test_glossaries_full_of_commas_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    kept = Glossaries(path)
    terms = {f"{i:04d}".ljust(LONGEST_TERM, ","): '["\\' * (LONGEST_TERM // 4) for i in range(MOST_ENTRIES)}
    one = asdict(kept.create("a", "en", "de", terms))
    write_json(path, {"glossaries": [one | {"id": str(i)} for i in range(50)]})
    del kept
    assert len(Glossaries(path).all()) == 50


def test_a_file_belongs_to_one_service(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    kept = Glossaries(path)
    with pytest.raises(SettingsError, match="another service uses it; give another file"):
        Glossaries(path)
    del kept
    assert Glossaries(path).all() == []


def test_a_file_is_read_once_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, another service may change it."""
    path, made = tmp_path / "glossaries.json", list[Glossary]()
    other = Glossaries(path)

    class WhenTheOtherEnds(FileLock):
        def acquire(self, *arguments: Any, **options: Any) -> Any:
            made.append(other.create("a", "en", "de", {"hat": "Hut"}))
            other._file_lock.release()
            return super().acquire(*arguments, **options)

    monkeypatch.setattr("transduce.serving.glossaries.FileLock", WhenTheOtherEnds)
    assert Glossaries(path).all() == made


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.json", Path("/dev/null/x.json")):
        with pytest.raises(SettingsError, match="give another file"):
            Glossaries(path)
    path = tmp_path / "x" / "glossaries.json"
    path.parent.mkdir()
    kept = Glossaries(path)
    assert [other.name for other in path.parent.iterdir()] == ["glossaries.json.lock"]
    one = kept.create("a", "en", "de", {"hat": "Hut"})
    path.parent.rename(tmp_path / "y")
    with pytest.raises(StorageError, match="nothing has changed"):
        kept.create("b", "en", "de", {"hat": "Hut"})
    with pytest.raises(StorageError, match="nothing has changed"):
        kept.delete(one.id)
    assert kept.all() == [one]
    (tmp_path / "y").rename(path.parent)
    kept.delete(one.id)
    del kept
    assert Glossaries(path).all() == []


@pytest.mark.parametrize("terms", [{}, {"a": ""}, {"": "a"}, {"a": "b\nc"}, {"a": "b\tc"}, {"a" * 101: "b"}])
def test_bad_entries_are_refused(terms: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="entries"):
        Glossaries().create("x", "en", "de", terms)


def test_sizes_are_limited() -> None:
    kept = Glossaries()
    with pytest.raises(SettingsError, match="from 1 to"):
        kept.create("x", "en", "de", {str(i): "a" for i in range(MOST_ENTRIES + 1)})
    for _ in range(MOST_GLOSSARIES):
        kept.create("x", "en", "de", {"a": "b"})
    with pytest.raises(SettingsError, match="delete one"):
        kept.create("x", "en", "de", {"a": "b"})


def test_tables_of_entries() -> None:
    assert parse_entries("a\tb\n\n c \td\te", "\t") == {"a": "b", "c": "d"}
    assert parse_entries('a,"b, ""c"""', ",") == {"a": 'b, "c"'}
    for bad in ("a", "a\tb\na\tc"):
        with pytest.raises(SettingsError, match="entries, line"):
            parse_entries(bad, "\t")
    with pytest.raises(SettingsError, match="comma-separated"):
        parse_entries("a," + "b" * 200_000, ",")
    with pytest.raises(SettingsError, match="one line"):
        Glossaries().create("x", "en", "de", parse_entries('"dog\ncat",x\n', ","))
