"""Small corpora as files, and samples of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.config.settings import Settings
from transduce.data.reading import Sample, take_sample
from transduce.demo.corpus import demo_pairs
from transduce.doctor.checks import CHECKS, Finding
from transduce.tasks.resolve import find_task

Pairs = list[tuple[str, str]]


def good(n: int = 1000, *, split: str = "train") -> Pairs:
    """Pairs of the built-in corpus, all different, some with a number."""
    found = dict.fromkeys((pair.src, pair.tgt) for pair in demo_pairs(split, n, seed=5))
    return [(f"{s} {i}", f"{t} {i}") if not i % 9 else (s, t) for i, (s, t) in enumerate(found)]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return path


def corpus(folder: Path, pairs: Pairs, name: str = "train") -> dict[str, str]:
    src, tgt = write(folder / f"{name}.en", [s for s, _ in pairs]), write(folder / f"{name}.de", [t for _, t in pairs])
    return {"src": str(src), "tgt": str(tgt)}


def settings(*train: dict[str, Any], task: str = "translation", **data: Any) -> Settings:
    values = {"src_lang": "en", "tgt_lang": "de", "train": list(train), **data}
    return Settings.from_mapping({"task": task, "data": values})


def sample_of(asked: Settings) -> Sample[Any]:
    return take_sample(find_task(asked.task).form.sources(asked))


def check(name: str, asked: Settings) -> list[Finding]:
    return list(next(check.run for check in CHECKS if check.name == name)(sample_of(asked), asked.data))


def check_pairs(name: str, folder: Path, pairs: Pairs, **data: Any) -> list[Finding]:
    return check(name, settings(corpus(folder, pairs), **data))


def serious(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(one.level, one.text) for one in found if one.level != "note"]
