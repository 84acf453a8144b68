"""What there is to see: the demonstration, and where a model looks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transduce.config import Settings, apply_override
from transduce.decoding.translator import Translator
from transduce.evaluation.finalize import attention_of
from transduce.evaluation.records import SentenceAttention, read_record
from transduce.inspection.pages import attention_page, save_picture
from transduce.inspection.terminal import legend, picture
from transduce.logging import Log
from transduce.pipeline import train
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder

# What reaches the best exact match in about two minutes on two cores.
DEMO: dict[str, dict[str, Any]] = {
    "data": {"demo": 60_000, "src_lang": "en", "tgt_lang": "de"},
    "tokenizer": {"kind": "unigram", "vocab_size": 2000},
    "model": {"preset": "tiny", "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0, "residual": "pre"},
    "training": {
        "batch_tokens": 2048,
        "schedule": "cosine",
        "warmup_updates": 50,
        "valid_updates": 200,
        "valid_bleu_sentences": 100,
        "stop_by": "loss",  # BLEU of 100 sentences is near 100 early, and then mostly chance
    },
    "decoding": {"beam": 2, "max_length": 64},
}
N_SHOWN = 8
SHOWN = "When will the old doctor call his friend?"


def demo(run: Path, *, minutes: float, overrides: Sequence[str] = (), log: Log) -> Iterator[str]:
    """Train on the built-in corpus for so many minutes; lines that tell what came of it."""
    values: dict[str, Any] = {section: dict(content) for section, content in DEMO.items()}
    values["name"] = "demonstration"
    values["training"]["max_minutes"] = minutes
    for override in overrides:
        apply_override(values, override)
    folder = train(Settings.from_mapping(values), run, log=log)
    yield from _shown(folder)
    translator = Translator.load(folder)
    yield "\nWhere the decoder looks (rows: what it writes; columns: what it reads):\n"
    yield _drawn(attention_of(translator, SHOWN))
    yield f"\nThe run folder, which is the model: {folder}\nIts report, for a browser: {folder / 'report.html'}"
    yield f'Try: echo "{SHOWN}" | transduce translate {folder}'


def _shown(folder: Path) -> Iterator[str]:
    """Translations beside their references, and the scores."""
    record = read_record(RunFolder.open(folder))
    for found in record.samples:
        yield f"\n{_title(found['name'])}, the first {N_SHOWN}:\n"
        for sample in found["samples"][:N_SHOWN]:
            right = sample["hyp"] == sample["ref"]
            yield f"  {sample['src']}\n    {'=' if right else '≠'} {sample['hyp']}"
            if not right:
                yield f"      {sample['ref']}  (reference)"
    yield "\nScores:\n"
    for scored in record.scores:
        yield f"  {_title(scored.name)}"
        yield from (f"    {line}" for line in scored.scores.lines())


def inspect(
    run: Path, sentence: str, *, tgt: str | None = None, html: Path | None = None, svg: Path | None = None, device: str
) -> str:
    """Cross-attention over a sentence as text; as files too where they are named."""
    seen = attention_of(Translator.load(run, device=device), sentence, tgt=tgt)
    if html is not None:
        write_text(html, attention_page(seen.src, seen.tgt, seen.maps))
    if svg is not None:
        save_picture(svg, seen.maps[0])
    files = [str(path) for path in (html, svg) if path is not None]
    return "\n".join([f"{seen.src}\n{seen.tgt}\n", _drawn(seen), *(f"written: {file}" for file in files)])


def _drawn(seen: SentenceAttention) -> str:
    """Cross-attention of the last layer, mean of its heads."""
    heat = seen.maps[0]
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    drawn = picture(heat.rows, heat.columns, heat.view(-1), width=width, colour=colour)
    return drawn if colour else f"{drawn}\n\n{legend()}"


def _title(name: str) -> str:
    return {"test": "Held-out sentences", "held_out_combinations": "Combinations never seen in training"}.get(
        name, name
    )
