"""`report.html`: what a run did, on one page that needs no network. Plain data in, text out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from transduce.evaluation import charts
from transduce.evaluation.charts import Curve, line_chart, smooth
from transduce.evaluation.records import UNSCORED, Record, SetScores, shown
from transduce.evaluation.report_data import data_section, provenance_section, settings_section, way_table
from transduce.evaluation.wording import wording_of
from transduce.inspection import heatmap
from transduce.inspection.heatmap import heat_map_figures
from transduce.inspection.page import escape, page, table
from transduce.logging import duration
from transduce.runs.atomic import write_text
from transduce.runs.folder import RunFolder

SHOWN_SAMPLES = 12


LABEL_COLUMNS = {
    "texts": ("n", "{:,}"),
    "accuracy": ("accuracy", "{:.2%}"),
    "macro F1": ("macro_f1", "{:.2%}"),
    "F1 of the second": ("binary_f1", "{:.2%}"),
    "Matthews": ("matthews", "{:.4f}"),
}
MASKED_COLUMNS = {
    "masked tokens told": ("masked_accuracy", "{:.2%}"),
    "nats a masked token": ("nll", "{:.4f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "next sentences told": ("next_sentence_accuracy", "{:.2%}"),
}
"""Columns of scores: their heads, the scores' names and forms."""


def write_report(run: RunFolder) -> None:
    """Write report.html into the run folder, from what its other files tell at this moment."""
    write_text(run.path / "report.html", shown(run, report_html))


def report_html(record: Record) -> str:
    """The whole page."""
    sections = [
        ("scores", "Scores", _scores(record)),
        ("curves", "Training", _curves(record)),
        ("samples", wording_of(record).samples, _samples(record.samples)),
        ("attention", "Attention", _attention(record)),
        ("data", "Data", data_section(record.data)),
        ("settings", "Settings", settings_section(record)),
        ("provenance", "How it was made", provenance_section(record)),
    ]
    filled = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in filled)
    body = "".join(f'<h2 id="{name}">{title}</h2>{content}' for name, title, content in filled)
    head = f"<h1>{escape(record.name)}</h1><p class='soft'>{escape(summary(record))}</p><nav>{links}</nav>"
    return page(f"{record.name}: report", head + _tiles(record) + body, script=charts.SCRIPT + heatmap.SCRIPT)


def summary(record: Record) -> str:
    """The model in one line."""
    return wording_of(record).shape(record)


def compact(value: float) -> str:
    """A count for people.

    >>> compact(950), compact(2_612_352), compact(60_500_000)
    ('950', '2.61M', '60.5M')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def _tiles(record: Record) -> str:
    """The few numbers that one looks for first."""
    tiles: list[tuple[str, str]] = []
    for found in record.scores[:2]:
        tiles.append((f"{found.scores.bleu.value:.1f}", f"BLEU {found.name}"))
    if record.scores and record.scores[0].scores.exact_match >= 0.1:
        tiles.append((f"{record.scores[0].scores.exact_match:.1%}", f"exact match {record.scores[0].name}"))
    for told in record.label_scores[:2]:
        tiles.append((f"{told['accuracy']:.1%}", f"accuracy {told['name']}"))
    for told in record.masked_scores[:2]:
        tiles.append((f"{told['masked_accuracy']:.1%}", f"masked tokens told, {told['name']}"))
    for told in record.text_scores[:2]:
        tiles.append((f"{told['bits_per_byte']:.3f}", f"bits a byte {told['name']}"))
    validations = record.of("validation")
    best = max((event.get("best_update") or 0 for event in record.events), default=0)
    kept = next((found for found in validations if found.get("update") == best), validations[-1] if validations else {})
    if kept.get("perplexity") is not None and "accuracy" not in kept:
        tiles.append((f"{kept['perplexity']:.2f}", "validation perplexity a token"))
    if record.n_parameters is not None:
        tiles.append((compact(record.n_parameters), "parameters"))
    if record.events:
        last = record.events[-1]
        tiles.append((duration(last.get("seconds") or 0), f"of training, {last.get('update', 0):,} updates"))
    speeds = [y for _, y in record.points("update", "tokens_per_second")]
    if speeds:
        tiles.append((compact(sorted(speeds)[len(speeds) // 2]), "target tokens a second"))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>' if tiles else ""


# -- scores


def _scores(record: Record) -> str:
    parts = []
    if record.scores:
        header: tuple[str, ...] = ("set", "sentences", "BLEU", "chrF", "TER", "exact", "precisions", "brevity")
        rows = [_score_row(found) for found in record.scores]
        parts.append(table(header, rows, numbers=frozenset({1, 2, 3, 4, 5, 6, 7})))
        parts.append(_signatures(record.scores))
    elif record.text_scores:
        header = ("text", "nats a token", "perplexity a token", "bits a byte", "tokens", "bytes")
        parts.append(table(header, map(_text_row, record.text_scores), numbers=frozenset({1, 2, 3, 4, 5})))
    elif record.label_scores or record.masked_scores:
        for rows_of, columns in ((record.label_scores, LABEL_COLUMNS), (record.masked_scores, MASKED_COLUMNS)):
            told = [[one["name"], *(cell(one.get(key), form) for key, form in columns.values())] for one in rows_of]
            parts += [table(("set", *columns), told, numbers=frozenset(range(1, len(columns) + 1)))] if told else []
    elif record.of("end"):
        parts.append(f"<p>{escape(UNSCORED)}</p>")
    return "".join(parts)


def cell(value: float | None, form: str) -> str:
    """A score for a table; empty where there is none."""
    return "" if value is None else form.format(value)


def _score_row(found: SetScores) -> tuple[object, ...]:
    s = found.scores
    precisions = " / ".join(f"{p:.1f}" for p in s.bleu.precisions)
    values = (f"{s.bleu.value:.2f}", f"{s.chrf.value:.2f}", f"{s.ter.value:.2f}", f"{s.exact_match:.1%}")
    return (found.name, f"{s.n_sentences:,}", *values, precisions, f"{s.bleu.brevity_penalty:.3f}")


def _text_row(told: Mapping[str, Any]) -> tuple[object, ...]:
    values = (f"{told['nll']:.4f}", f"{told['perplexity']:.3f}", f"{told['bits_per_byte']:.4f}")
    return (told["name"], *values, f"{told['tokens']:,}", f"{told['bytes']:,}")


def _signatures(scores: Sequence[SetScores]) -> str:
    """Signatures, each once, with the sets that it stands for."""
    sets: dict[tuple[str, ...], list[str]] = {}  # lines -> names
    for found in scores:
        s = found.scores
        search = ", ".join(f"{key} {value}" for key, value in found.search.items())
        lines = (f"BLEU {s.bleu.signature}", f"chrF {s.chrf.signature}", f"TER {s.ter.signature}", search, *s.notes)
        sets.setdefault(lines, []).append(found.name)
    blocks = []
    for told, names in sets.items():
        which = f"<p class='soft'>{escape(', '.join(names))}:</p>" if len(sets) > 1 else ""
        blocks.append(which + "<p>" + "<br>".join(f"<code>{escape(line)}</code>" for line in told if line) + "</p>")
    return "".join(blocks)


# -- training


def _curves(record: Record) -> str:
    restarts = [float(e.get("update", 0)) for e in record.of("restart")]
    training = record.points("update", "loss")
    window = max(1, len(training) // 50)
    loss = [
        Curve("each line", training, pale=True),
        Curve("training", smooth(training, window=window)),
        Curve("validation", record.points("validation", "loss")),
    ]
    speed = record.points("update", "tokens_per_second")
    smoothed = ", label-smoothed" if record.settings.training.label_smoothing else ""
    charts = [
        line_chart("Loss, nats a target token" + smoothed, loss, marks=restarts, settle=0.05),
        line_chart(
            "Validation scores",
            [Curve("BLEU", record.points("validation", "bleu")), Curve("chrF", record.points("validation", "chrf"))],
            marks=restarts,
        ),
        line_chart(
            "Validation, bits a byte",
            [Curve("bits a byte", record.points("validation", "bits_per_byte"))],
            marks=restarts,
            settle=0.05,
        ),
        line_chart(
            "Validation, shares",
            [
                Curve(label, record.points("validation", key))
                for label, key in (
                    ("accuracy", "accuracy"),
                    ("macro F1", "macro_f1"),
                    ("masked tokens", "masked_accuracy"),
                    ("next sentences", "next_sentence_accuracy"),
                )
            ],
            marks=restarts,
        ),
        line_chart("Learning rate", [Curve("learning rate", record.points("update", "lr"))], marks=restarts),
        line_chart(
            "Target tokens a second",
            [Curve("each line", speed, pale=True), Curve("tokens a second", smooth(speed, window=window))],
            marks=restarts,
            floor=0.0,
        ),
        line_chart(
            "Gradient norm", [Curve("gradient norm", record.points("update", "grad_norm"))], marks=restarts, settle=0.05
        ),
    ]
    shown, way = "".join(filter(None, charts)), way_table(record)
    if not shown:
        return way
    end = record.of("end")
    told = f"Ended by {end[-1].get('reason', '')} after {end[-1].get('update', 0):,} updates. " if end else ""
    dashed = "Dashed lines: restarts. " if restarts else ""
    return f'<p class="soft">{escape(told + dashed)}Over updates.</p><div class="charts">{shown}</div>{way}'


# -- translations


def _samples(sets: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for found in sets:
        samples = found.get("samples", ())
        parts.append(f"<h3>{escape(found['name'])}, update {found.get('update', 0):,}</h3>")
        parts += [_sample(s) for s in samples[:SHOWN_SAMPLES]]
        if len(samples) > SHOWN_SAMPLES:
            more = "".join(map(_sample, samples[SHOWN_SAMPLES:]))
            parts.append(f"<details><summary>{len(samples) - SHOWN_SAMPLES} more</summary>{more}</details>")
    compared = any("ref" in sample for found in sets for sample in found.get("samples", ()))
    note = "<p class='soft'>Words in which translation and reference differ are marked.</p>" if compared else ""
    return note + "".join(parts) if parts else ""


def _sample(sample: Mapping[str, str]) -> str:
    if "prompt" in sample:
        text = f"<b>{escape(sample['prompt'])}</b>{escape(sample['text'])}"
        return f'<p class="sample running" dir="auto">{text}</p>'
    ref, hyp = marked(sample["ref"], sample["hyp"])
    lines = (("source", escape(sample["src"])), ("reference", ref), ("translation", hyp))
    cells = "".join(f'<dt>{name}</dt><dd dir="auto">{text}</dd>' for name, text in lines)
    return f'<dl class="sample">{cells}</dl>'


def marked(ref: str, hyp: str) -> tuple[str, str]:
    """Both as HTML, with the words that the other has not in <ins> (reference) and <del> (translation).

    >>> marked("a dog", "a cat")
    ('a <ins>dog</ins>', 'a <del>cat</del>')
    """
    a, b = ref.split(), hyp.split()
    left, right = [], []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        same = kind == "equal"
        left += [_wrapped(a[i:j], "" if same else "ins")]
        right += [_wrapped(b[k:m], "" if same else "del")]
    return " ".join(filter(None, left)), " ".join(filter(None, right))


def _wrapped(words: Sequence[str], tag: str) -> str:
    text = escape(" ".join(words))
    return f"<{tag}>{text}</{tag}>" if tag and words else text


def _attention(record: Record) -> str:
    parts = []
    for sentence in record.attention:
        head = f'<h3 dir="auto">{escape(sentence.src)}</h3><p dir="auto" class="soft">{escape(sentence.tgt)}</p>'
        parts.append(head + heat_map_figures(sentence.maps))
    note = (
        "<p class='soft'>Held-out sentences. Each row is a position that attends, each column one attended to; a row "
        "sums to 1. Choose layer and head; point at a cell for its weight.</p>"
    )
    return note + "".join(parts) if parts else ""
