"""`report.html`: what a run did, as one page that works offline."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from markupsafe import Markup, escape

import transduce
from transduce.evaluation.charts import Curve, line_chart, smooth
from transduce.evaluation.html import render
from transduce.evaluation.metrics import compare_with_float32
from transduce.evaluation.result_files import Record, SetScores, Wording, render_record
from transduce.inspection.page import script_of
from transduce.logging import duration
from transduce.runs.folder import RunFolder

N_SAMPLES = 12  # shown; the rest is folded
UNSCORED = "Nothing was scored when this run was trained: it was given no test text."

_COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "text_scores": {
        "nats per token": ("nll", "{:.4f}"),
        "perplexity per token": ("perplexity", "{:.3f}"),
        "bits per byte": ("bits_per_byte", "{:.4f}"),
        "tokens": ("tokens", "{:,}"),
        "bytes": ("bytes", "{:,}"),
    },
    "label_scores": {
        "texts": ("n", "{:,}"),
        "accuracy": ("accuracy", "{:.2%}"),
        "macro F1": ("macro_f1", "{:.2%}"),
        "F1 of the second": ("binary_f1", "{:.2%}"),
        "Matthews": ("matthews", "{:.4f}"),
    },
    "masked_scores": {
        "masked-token accuracy": ("masked_accuracy", "{:.2%}"),
        "nats per masked token": ("nll", "{:.4f}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "next-sentence accuracy": ("next_sentence_accuracy", "{:.2%}"),
    },
}
"""Columns of score tables: heading, key of the score, format."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; every column but the first has numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(run: RunFolder, wording: Wording) -> None:
    """Write report.html into the run folder, from its other files."""
    run.write_page("report.html", render_report(run, wording))


def render_report(run: RunFolder, wording: Wording) -> str:
    """The page of a run, from its files."""
    return render_record(run, lambda record: report_html(record, wording))


def report_html(record: Record, wording: Wording) -> str:
    """Render the page."""
    end, wording = record.of("end"), wording.of(record.settings)
    padding = [share for _, share in record.points("update", "padding")]
    return render(
        "report.html",
        title=f"{record.name}: report",
        record=record,
        data=record.data,
        padding=sum(padding) / len(padding) if padding else None,
        summary=wording.shape,
        tiles=_tiles(record),
        score_tables=score_tables(record),
        signatures=signatures(record.scores),
        unscored=unscored(record),
        charts=_charts(record),
        end=end[-1] if end else None,
        events=_events(record),
        samples_title=wording.samples,
        n_samples=N_SAMPLES,
        marked=marked,
        heads_script=Markup(script_of("report.js")),
        sets=set_table(record.data.get("sets", ())),
        leaks=[(leak_line(leak), leak) for leak in record.data.get("leaks", ())],
        settings=_settings(record),
        provenance=_provenance(record),
    )


def _tiles(record: Record) -> list[tuple[str, str]]:
    """Return the most important numbers, each with its name."""
    tiles = [(f"{found.scores.bleu.value:.1f}", f"BLEU {found.name}") for found in record.scores[:2]]
    if record.scores and record.scores[0].scores.exact_match >= 0.1:
        tiles.append((f"{record.scores[0].scores.exact_match:.1%}", f"exact match {record.scores[0].name}"))
    tiles += [(f"{s['accuracy']:.1%}", f"accuracy {s['name']}") for s in record.label_scores[:2]]
    tiles += [(f"{s['masked_accuracy']:.1%}", f"masked-token accuracy {s['name']}") for s in record.masked_scores[:2]]
    tiles += [(f"{s['bits_per_byte']:.3f}", f"bits per byte {s['name']}") for s in record.text_scores[:2]]
    validations = record.of("validation")
    best = max((event.get("best_update") or 0 for event in record.events), default=0)
    kept = next((found for found in validations if found.get("update") == best), validations[-1] if validations else {})
    if kept.get("perplexity") is not None and "accuracy" not in kept:
        tiles.append((f"{kept['perplexity']:.2f}", "validation perplexity per token"))
    if record.n_parameters is not None:
        tiles.append((compact(record.n_parameters), "parameters"))
    if record.events:
        last = record.events[-1]
        tiles.append((duration(last.get("seconds") or 0), f"training time, {last.get('update', 0):,} updates"))
    if speeds := sorted(y for _, y in record.points("update", "tokens_per_second")):
        tiles.append((compact(speeds[len(speeds) // 2]), "target tokens per second"))
    return tiles


def signatures(scores: Sequence[SetScores]) -> list[tuple[str, list[str]]]:
    """Descriptions of the scoring: (names of sets, lines). Sets with the same lines are listed together."""
    names: dict[tuple[str, ...], list[str]] = {}
    for found in scores:
        search = ", ".join(f"{key} {value}" for key, value in found.search.items())
        lines = [f"{name} {signature}" for name, signature in found.scores.signatures().items()]
        names.setdefault((*lines, *filter(None, [search]), *found.scores.notes), []).append(found.name)
    return [(", ".join(sets), list(lines)) for lines, sets in names.items()]


def _charts(record: Record) -> list[Markup]:
    restarts = [float(event.get("update", 0)) for event in record.of("restart")]
    loss, speed = record.points("update", "loss"), record.points("update", "tokens_per_second")
    window = max(1, len(loss) // 50)
    smoothed = ", label-smoothed" if record.settings.training.label_smoothing else ""

    def validation(title: str, **keys: str) -> Markup:
        curves = [Curve(name.replace("_", " "), record.points("validation", key)) for name, key in keys.items()]
        return line_chart(title, curves, marks=restarts)

    charts = [
        line_chart(
            "Loss, nats per target token" + smoothed,
            [
                Curve("single updates", loss, pale=True),
                Curve("training", smooth(loss, window=window)),
                Curve("validation", record.points("validation", "loss")),
            ],
            marks=restarts,
            settle=0.05,
        ),
        validation("Validation scores", BLEU="bleu", chrF="chrf"),
        validation("Validation, bits per byte", bits_per_byte="bits_per_byte"),
        validation(
            "Validation accuracy",
            accuracy="accuracy",
            macro_F1="macro_f1",
            masked_tokens="masked_accuracy",
            next_sentences="next_sentence_accuracy",
        ),
        line_chart("Learning rate", [Curve("learning rate", record.points("update", "lr"))], marks=restarts),
        line_chart(
            "Target tokens per second",
            [Curve("single updates", speed, pale=True), Curve("tokens per second", smooth(speed, window=window))],
            marks=restarts,
            floor=0.0,
        ),
        line_chart(
            "Gradient norm", [Curve("gradient norm", record.points("update", "grad_norm"))], marks=restarts, settle=0.05
        ),
    ]
    return list(filter(None, charts))


def _events(record: Record) -> list[tuple[str, str, str, str]]:
    """Return restarts, skipped updates and batches split for memory, in order: event, update, explanation, time."""
    rows = []
    for event in record.events:
        update = event.get("update", 0)
        if event["event"] == "restart":
            row = "restart", update, "interrupted: " + ("resumed from the checkpoint" if update else "started again")
        elif event["event"] == "skipped":
            row = "skipped", update, "the loss or its gradient was not finite; the weights did not change"
        elif event["event"] == "memory":
            too_large = f"{event['too_large']:,}"
            row = "out of memory", update, f"batches of {too_large} slots or more are split in two from here on"
        else:
            continue
        rows.append((row[0], f"{row[1]:,}", row[2], duration(event["seconds"]) if event.get("seconds") else ""))
    return rows


def marked(ref: str, hyp: str) -> tuple[Markup, Markup]:
    """Mark the words that the other text lacks: <ins> in the reference, <del> in the translation.

    >>> print(*marked("a dog", "a cat"))
    a <ins>dog</ins> a <del>cat</del>
    """
    a, b = ref.split(), hyp.split()
    left, right = [], []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        left.append(_wrapped(a[i:j], "" if kind == "equal" else "ins"))
        right.append(_wrapped(b[k:m], "" if kind == "equal" else "del"))
    return Markup(" ").join(filter(None, left)), Markup(" ").join(filter(None, right))


def _wrapped(words: Sequence[str], tag: str) -> Markup:
    text = escape(" ".join(words))
    return Markup(f"<{tag}>{text}</{tag}>") if tag and words else text


def set_table(sets: Sequence[Mapping[str, Any]]) -> Table | None:
    """The sizes of the data sets; the last column is text. Only pairs are cleaned, and of those not the test sets."""
    sizes = ("documents", "texts", "pairs", "bytes", "tokens", "src_tokens", "tgt_tokens")
    counts = [{**found, **_dropped(found.get("cleaning"))} for found in sets]
    used = [key for key in (*sizes, "dropped") if any(key in found for found in counts)]
    rows = []
    for found in counts:
        texts = (f"{found[key]:,}" if key in found else "" for key in used)
        rows.append([str(found["name"]), *texts, ", ".join(map(str, found.get("files", ())))])
    return Table(("set", *(key.replace("_", " ") for key in used), "files"), rows) if sets else None


def _dropped(cleaning: Mapping[str, Any] | None) -> dict[str, int]:
    return {"dropped": cleaning["read"] - cleaning["kept"]} if cleaning else {}


def leak_line(leak: Mapping[str, Any]) -> str:
    """A line on the overlap of a set with the training text."""
    n, total, sources = leak.get("leaked", 0), leak.get("pairs", 0), leak.get("sources", 0)
    text = f"{leak['name']}: {n:,} of {total:,} {leak.get('unit', 'pairs')} overlap with the training text"
    return text + (f", and {sources - n:,} more sources with another translation" if sources > n else "")


def _settings(record: Record) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return all settings by section: (name, value, description)."""
    sections = []
    for section, fields in record.settings.model_dump(mode="json").items():
        if isinstance(fields, dict):
            known = type(getattr(record.settings, section)).model_fields
            rows = [(key, _value(value), known[key].description or "") for key, value in fields.items()]
            sections.append((section, rows))
    return sections


def _value(value: Any) -> str:
    """Format a setting for people: TOML's words; a corpus as its files."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items() if item is not None)
    return "; ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _provenance(record: Record) -> list[tuple[str, str]]:
    rows = list(record.versions.items())
    if record.events:
        restarts = record.of("restart")
        places = ", ".join(f"after update {event.get('update', 0):,}" for event in restarts)
        rows.append(("restarts", f"{len(restarts)}: {places}" if restarts else "none"))
    software = f"transduce {transduce.__version__}, sacrebleu {metadata.version('sacrebleu')}"
    return [*rows, ("this page", f"written by {software}")]


def score_tables(record: Record) -> list[Table]:
    """The scores of all test sets, one table per kind of score."""
    tables = []
    if record.scores:
        header = ("set", "sentences", "BLEU", "chrF", "TER", "exact", "precisions", "brevity")
        tables.append(Table(header, [_translation_row(found) for found in record.scores]))
    for name, columns in _COLUMNS.items():
        rows = [
            [
                str(found["name"]),
                *("" if (value := found.get(key)) is None else form.format(value) for key, form in columns.values()),
            ]
            for found in getattr(record, name)
        ]
        if rows:
            tables.append(Table(("set", *columns), rows))
    if record.precisions:
        tables.append(_precision_table(record.precisions))
    return tables


def _precision_table(found: Mapping[str, Any]) -> Table:
    rows = [
        [name, f"{bleu:.2f}", f"{difference:+.2f}", f"{speed:,.0f}", f"{times:.1f}"]
        for name, bleu, difference, speed, times in compare_with_float32(found["precisions"])
    ]
    header = f"precision, {found['sentences']:,} validation sentences"
    return Table((header, "BLEU", "difference", "sentences per second", "times as fast"), rows)


def unscored(record: Record) -> str:
    """A note if the run has finished without scores."""
    scored = record.scores or any(getattr(record, name) for name in _COLUMNS)
    return UNSCORED if record.of("end") and not scored else ""


def compact(value: float) -> str:
    """Format a count for people.

    >>> compact(950), compact(2_612_352), compact(60_500_000)
    ('950', '2.61M', '60.5M')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def _translation_row(found: SetScores) -> list[str]:
    s = found.scores
    values = [f"{s.bleu.value:.2f}", f"{s.chrf.value:.2f}", f"{s.ter.value:.2f}", f"{s.exact_match:.1%}"]
    precisions = " / ".join(f"{p:.1f}" for p in s.bleu.precisions)
    return [found.name, f"{s.n_sentences:,}", *values, precisions, f"{s.bleu.brevity_penalty:.3f}"]
