"""A sample as files that a training reads, and what is said of them as if it were said of the user's own files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transduce.config import Corpus
from transduce.doctor.sampling import Block, Part
from transduce.tasks.base import Form


@dataclass(frozen=True, slots=True)
class _Copy:
    """A file that holds some lines of another one; `numbers`: where they stand there."""

    path: Path
    of: str
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Copies:
    """The files of a folder, and what they were copied from."""

    folder: Path
    form: Form
    files: list[_Copy] = field(default_factory=list)

    def write(self, part: Part, windows: Sequence[Block]) -> Corpus:
        """Some windows of a part as files of their own, so that what is told of files holds; a corpus of them."""
        rows = [row for window in windows for row in window.rows]
        numbers = [number for window in windows for number in window.numbers]
        n = 2 if self.form == "pairs" else 1
        sides = [[row[side] for row in rows] for side in range(n)] if n == 2 else [["\t".join(row) for row in rows]]
        names = (*part.files, *part.files)[:n]  # one file may hold both sides
        paths = [self.folder / f"copy-{len(self.files) + side}-of-a-file.txt" for side in range(n)]
        for path, name, lines in zip(paths, names, sides, strict=True):
            text = "".join(line.replace("\n", " ") + "\n" for line in lines)
            path.write_text(text, encoding="utf-8", newline="\n")
            self.files.append(_Copy(path, name, numbers))
        return Corpus(src=paths[0], tgt=paths[1]) if n == 2 else Corpus(path=paths[0])

    def told(self, text: str) -> str:
        """A text with the names and the line numbers of the files that were copied."""
        for copy in self.files:
            for ours, theirs in ((str(copy.path), copy.of), (copy.path.name, Path(copy.of).name)):
                text = re.sub(rf"{re.escape(ours)}, line (\d+)", partial(_placed, copy, theirs), text)
                text = text.replace(ours, theirs)
        return text


def _placed(copy: _Copy, name: str, match: re.Match[str]) -> str:
    number = int(match[1])
    return f"{name}, line {copy.numbers[number - 1]}" if 0 < number <= len(copy.numbers) else name
