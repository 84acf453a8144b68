"""The model card, README.md of the run folder: what the model is, its scores, its use and its limits."""

from __future__ import annotations

import re

from markupsafe import Markup

from transduce.evaluation.html import environment
from transduce.evaluation.report import compact, leak_line, score_tables, set_table, signatures, unscored
from transduce.evaluation.result_files import Record, Wording, render_record
from transduce.logging import duration
from transduce.runs.folder import RunFolder

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>&|~$])")


def write_card(run: RunFolder, wording: Wording) -> None:
    """Write README.md into the run folder, from its other files."""
    run.write_page("README.md", render_record(run, lambda record: card(record, wording)))


def card(record: Record, wording: Wording) -> str:
    """Render the card as Markdown."""
    settings, wording = record.settings, wording.of(record.settings)
    start = settings.training.start
    templates = environment(autoescape=False).overlay(finalize=plain)  # escaped for Markdown by `plain`
    text = templates.get_template("card.md").render(
        code=code,
        record=record,
        head=wording.title,
        start=start.name if start is not None else "",
        summary=wording.shape,
        n_parameters="" if record.n_parameters is None else compact(record.n_parameters),
        score_tables=score_tables(record),
        signatures=signatures(record.scores),
        unscored=unscored(record),
        wording=wording,
        sets=set_table(record.data.get("sets", ())),
        training=_training(record),
        limits=wording.limits,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def plain(text: object) -> str:
    r"""Put text on one line, with the special characters of Markdown and HTML escaped. `Markup` stays as it is.

    >>> print(plain("a *b* <c>\nd"))
    a \*b\* \<c\> d
    """
    return text if isinstance(text, Markup) else _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def code(text: object) -> Markup:
    """Format text as a code span."""
    return Markup(f"`{' '.join(str(text).replace('`', ' ').split())}`")


def _training(record: Record) -> list[str]:
    """The training text, settings and software of the model."""
    t = record.settings.training
    lines = [leak_line(leak) for leak in record.data.get("leaks", ()) if leak.get("leaked")]
    if record.data.get("fingerprint"):
        lines.append(f"fingerprint of the encoded training data: {record.data['fingerprint']}")
    if record.events:
        last, restarts = record.events[-1], len(record.of("restart"))
        how = f"{t.optimizer or 'optimizer'} with {t.schedule or 'its'} schedule, weight averaging: {t.average}"
        lines.append(f"{last.get('update', 0):,} updates in {duration(last.get('seconds') or 0)}, {how}")
        lines.append(f"restarts: {restarts}; seed {t.seed}")
    if record.versions:
        lines.append(", ".join(f"{key} {value}" for key, value in record.versions.items()))
    return lines
