"""The model card, README.md of the run folder: what the model is, what it scores, how it is used, and its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from transduce.config.purposes import PURPOSES
from transduce.evaluation.records import UNSCORED, Record, shown
from transduce.evaluation.report import LABEL_COLUMNS, MASKED_COLUMNS, cell, compact, summary
from transduce.evaluation.wording import wording_of
from transduce.logging import duration
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>&|~$])")
_SAMPLES = 3


def write_card(run: RunFolder) -> None:
    """Write README.md into the run folder, from what its other files tell at this moment."""
    write_text(run.path / "README.md", shown(run, card))


def card(record: Record) -> str:
    """The whole card, Markdown."""
    parts = [_head(record), _scores(record), _use(record), _samples(record), _training(record), _limits(record)]
    return "\n\n".join(filter(None, parts)) + "\n"


def plain(text: object) -> str:
    r"""Text on one line in which Markdown and HTML see no signs of their own.

    >>> print(plain("a *b* <c>\nd"))
    a \*b\* \<c\> d
    """
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def _head(record: Record) -> str:
    size = "" if record.n_parameters is None else f", {compact(record.n_parameters)} parameters"
    start = record.settings.training.start
    begun = "trained from scratch" if start is None else f"trained from the weights of `{plain(start.name)}`"
    return (
        f"# {plain(record.name)}\n\n{PURPOSES[record.settings.task].head_of(record.settings.data)}, {begun} with "
        f"transduce.\n\n{plain(summary(record))}{size}."
    )


def _scores(record: Record) -> str:
    if record.text_scores:
        lines = [
            "## Scores",
            "",
            "| text | nats a token | perplexity | bits a byte | tokens |",
            "|---|--:|--:|--:|--:|",
        ]
        for text in record.text_scores:
            values = f"{text['nll']:.4f} | {text['perplexity']:.3f} | {text['bits_per_byte']:.4f} | {text['tokens']:,}"
            lines.append(f"| {plain(text['name'])} | {values} |")
        return "\n".join(lines)
    for rows, columns in ((record.label_scores, LABEL_COLUMNS), (record.masked_scores, MASKED_COLUMNS)):
        if rows:
            cells = [[found["name"], *(cell(found.get(key), form) for key, form in columns.values())] for found in rows]
            table = [("set", *columns), ("---", *("--:" for _ in columns)), *([plain(c) for c in row] for row in cells)]
            return "\n".join(["## Scores", "", *(f"| {' | '.join(row)} |" for row in table)])
    if not record.scores:
        return f"## Scores\n\n{UNSCORED}" if record.of("end") else ""
    lines = ["## Scores", "", "| set | sentences | BLEU | chrF | TER | exact |", "|---|--:|--:|--:|--:|--:|"]
    signatures: dict[str, None] = {}  # each once, in order
    for found in record.scores:
        s = found.scores
        values = f"{s.bleu.value:.2f} | {s.chrf.value:.2f} | {s.ter.value:.2f} | {s.exact_match:.1%}"
        lines.append(f"| {plain(found.name)} | {s.n_sentences:,} | {values} |")
        told = (("BLEU", s.bleu), ("chrF", s.chrf), ("TER", s.ter))
        signatures |= dict.fromkeys(f"- {name} `{score.signature}`" for name, score in told)
        search = ", ".join(f"{key} {value}" for key, value in found.search.items())
        signatures |= dict.fromkeys([f"- search: {plain(search)}"] if search else [])
        signatures |= dict.fromkeys(f"- note: {plain(note)}" for note in s.notes)
    return "\n".join(
        [
            *lines,
            "",
            "TER counts errors: lower is better. A score means something with its signature only:",
            "",
            *signatures,
        ]
    )


def _use(record: Record) -> str:
    words = wording_of(record)
    return (
        "## Use\n\nThis folder is the model; move or copy it as a whole. With transduce installed:\n\n"
        f"```sh\n{words.command}\n```\n\n```python\n{words.python}\n```"
    )


def _samples(record: Record) -> str:
    for found in record.samples[:1]:
        head = f"## Examples\n\nThe first few of {plain(found['name'])}, not chosen.\n\n"
        if any("prompt" in sample for sample in found["samples"]):
            told = [f"> **{plain(s['prompt'])}** {plain(s['text'])}" for s in found["samples"][:_SAMPLES]]
            return head + "\n\n".join(told)
        rows = [f"| {plain(s['src'])} | {plain(s['hyp'])} | {plain(s['ref'])} |" for s in found["samples"][:_SAMPLES]]
        return head + "\n".join(["| source | translation | reference |", "|---|---|---|", *rows])
    return ""


def _training(record: Record) -> str:
    t, lines = record.settings.training, ["## Training", ""]
    lines += [_set_line(found) for found in record.data.get("sets", ())]
    for name, n, unit in _leaked(record.data):
        lines.append(f"- {plain(name)}: {n:,} of its {unit} stand in the training text too")
    if record.data.get("fingerprint"):
        lines.append(f"- fingerprint of the encoded training data: `{record.data['fingerprint']}`")
    if record.events:
        last, restarts = record.events[-1], len(record.of("restart"))
        how = f"{t.optimizer or 'optimizer'} with {t.schedule or 'its'} schedule, weights averaged: {t.average}"
        lines.append(f"- {last.get('update', 0):,} updates in {duration(last.get('seconds') or 0)}, {how}")
        lines.append(f"- restarts: {restarts}; seed {t.seed}")
    if record.versions:
        lines.append("- " + ", ".join(f"{plain(key)} {plain(value)}" for key, value in record.versions.items()))
    lines.append(
        "- everything else: [report.html](report.html), [config.json](config.json), [recipe.toml](recipe.toml)"
    )
    return "\n".join(lines)


def _set_line(found: Mapping[str, Any]) -> str:
    """A set of pairs, by the names of its files only: where they lay is nobody's business."""
    files = ", ".join(f"`{PurePath(str(file)).name}`" for file in found.get("files", ()))
    if "texts" in found:
        size = f"{found['texts']:,} texts, {found['tokens']:,} tokens"
    elif "bytes" in found:
        size = f"{found['bytes']:,} bytes, {found['tokens']:,} tokens"
    else:
        size = f"{(found.get('cleaning') or {}).get('kept', found.get('pairs', 0)):,} sentence pairs"
    return f"- {plain(found['name'])}: {size}" + (f" ({files})" if files else "")


def _leaked(data: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    return [
        (leak["name"], leak["leaked"], leak.get("unit", "pairs"))
        for leak in data.get("leaks", ())
        if leak.get("leaked")
    ]


def _limits(record: Record) -> str:
    told = (
        "It knows the kind of text that it was trained on and no other; scores on other text will be lower.",
        *wording_of(record).limits(record),
        "What is wrong or biased in the training text may come out again; read what matters before you use it.",
    )
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in told)
