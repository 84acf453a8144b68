"""Glossaries of a service."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from transduce.errors import SettingsError, UserError
from transduce.runs.atomic import write_json
from transduce.serving.glossaries import (
    LONGEST_TERM,
    MOST_ENTRIES,
    MOST_GLOSSARIES,
    Glossaries,
    StorageError,
    parse_entries,
)


def test_glossaries_outlive_the_process_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    kept = Glossaries(path)
    one, two = (kept.create(name, "EN", "de", {"hat": "Hut"}) for name in "ab")
    assert kept.delete(one.id) and not kept.delete(one.id)
    again = Glossaries(path)
    assert again.all() == [two] and again.find(two.id) == two and again.find(one.id) is None
    assert again.terms(two.id, "en-GB", "DE") == {"hat": "Hut"}
    with pytest.raises(SettingsError, match="is for en-de, not de-en"):
        again.terms(two.id, "de", "en")
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
    assert len(Glossaries(path).all()) == 50


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    one, other = Glossaries(path), Glossaries(path)
    first = one.create("a", "en", "de", {"hat": "Hut"})
    assert other.terms(first.id, "en", "de") == {"hat": "Hut"}
    second = other.create("b", "en", "de", {"cat": "Katze"})
    assert one.all() == [first, second] == Glossaries(path).all()
    assert one.delete(second.id) and other.find(second.id) is None and not other.delete(second.id)
    script = (
        "import sys, pathlib; from transduce.serving.glossaries import Glossaries\n"
        "kept = Glossaries(pathlib.Path(sys.argv[1]))\n"
        "for i in range(15): kept.create(sys.argv[2], 'en', 'de', {'a': 'b'})"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), name]) for name in "xyz"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert sorted(found.name for found in one.all()) == ["a", *"x" * 15, *"y" * 15, *"z" * 15]


def test_a_file_that_was_damaged_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "glossaries.json"
    kept = Glossaries(path)
    first = kept.create("a", "en", "de", {"hat": "Hut"})
    path.write_text("{", encoding="utf-8")
    assert kept.all() == [first]
    with pytest.raises(StorageError, match="nothing has changed"):
        kept.create("b", "en", "de", {"hat": "Hut"})
    assert path.read_text(encoding="utf-8") == "{" and kept.all() == [first]


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.json", Path("/dev/null/x.json")):
        with pytest.raises(SettingsError, match="give another file"):
            Glossaries(path)
    path = tmp_path / "x" / "glossaries.json"
    path.parent.mkdir()
    kept = Glossaries(path)
    assert not list(path.parent.iterdir())
    one = kept.create("a", "en", "de", {"hat": "Hut"})
    path.parent.rename(tmp_path / "y")
    with pytest.raises(StorageError, match="nothing has changed"):
        kept.create("b", "en", "de", {"hat": "Hut"})
    with pytest.raises(StorageError, match="nothing has changed"):
        kept.delete(one.id)
    assert kept.all() == [one]
    (tmp_path / "y").rename(path.parent)
    assert kept.delete(one.id) and Glossaries(path).all() == []


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
