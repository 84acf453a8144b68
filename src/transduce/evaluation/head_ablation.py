"""Effect of removing each head on BLEU and loss of a translator (Michel et al. 2019)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.errors import DataError
from transduce.evaluation.metrics import Scoring, metrics
from transduce.inspection.inspected_models import TranslationSubject
from transduce.logging import Log
from transduce.metrics_log import MetricsFile
from transduce.nn.recording import switched_off, switches
from transduce.runs.atomic import write_text

_ALL = ""  # name of the row in which no head is off


def ablate_heads(
    subject: TranslationSubject, srcs: Sequence[str], refs: Sequence[str], path: Path, log: Log
) -> list[dict[str, Any]]:
    """Translate and score with each head switched off in turn; the first row has all heads on.

    Rows have `name`, `title`, `bleu`, and `loss`: nats per token of the references. The file `path` gets a line of JSON
    per row; rows in the file are not computed again. Raises `DataError` if they belong to another model, other texts or
    other settings.
    """
    heads = {name: title for name, title in switches(subject.model).items() if ".heads." in name}
    if not heads:
        raise DataError("this model has no heads that can be switched off; give a run of a Transformer")
    key = _key(subject, srcs, refs)
    file = MetricsFile(path)
    rows = {row.get("name", _ALL): row for row in file.read()}
    if any(row.get("key") != key for row in rows.values()):
        raise DataError(
            f"{path}: has results of another model, other texts or other settings; name another file, or remove it"
        )
    if not rows and path.exists() and path.stat().st_size:
        raise DataError(f"{path}: has no results of --ablate-heads; name another file, or remove it")
    if rows:  # drop a line that a kill has cut short
        write_text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows.values()))
    names = {_ALL: "all heads", **heads}
    with log.progress("heads") as bar:
        for number, (name, title) in enumerate(names.items()):
            bar.update(number / len(names), note=title)
            if name not in rows:
                bleu, loss = _scores(subject, [name] if name else [], srcs, refs)
                rows[name] = {"event": "head", "key": key, "name": name, "title": title, "bleu": bleu, "loss": loss}
                file.append(rows[name])
        bar.update(1.0)
    return [rows[name] for name in names]


def format_ablation(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format a table, the most important heads first."""
    whole, *others = rows
    yield f"{'':44} {'loss':>8} {'BLEU':>7}"
    yield f"{whole['title']:44} {whole['loss']:8.4f} {whole['bleu']:7.2f}"
    for row in sorted(others, key=lambda row: -row["loss"]):
        yield f"{row['title']:44} {row['loss'] - whole['loss']:+8.4f} {row['bleu'] - whole['bleu']:+7.2f}"


def _scores(
    subject: TranslationSubject, off: Sequence[str], srcs: Sequence[str], refs: Sequence[str]
) -> tuple[float, float]:
    engine = TorchEngine(switched_off(subject.model, off))
    of_run = None if subject.folder is None else subject.folder.settings
    data, limit = (None, None) if of_run is None else (of_run.data, of_run.model.position_limit)
    translator = Translator(engine, subject.tokenizers, settings=subject.settings, data=data, position_limit=limit)
    outputs = [translation.text for translation in translator.translate(srcs)]
    bleu: Any = metrics(*_scoring(subject))["BLEU"]
    log_probs = [log_prob for scored in translator.score(srcs, refs) for log_prob in scored.token_log_probs]
    return float(bleu.corpus_score(outputs, [list(refs)]).score), -sum(log_probs) / max(1, len(log_probs))


def _scoring(subject: TranslationSubject) -> Scoring:
    return Scoring() if subject.folder is None else Scoring.of(subject.folder.settings)


def _key(subject: TranslationSubject, srcs: Sequence[str], refs: Sequence[str]) -> str:
    """Return a digest of the model, the settings of its translations and scores, and the texts."""
    model = "" if subject.folder is None else subject.folder.model_digest()
    settings = subject.settings.model_dump_json(), json.dumps(_scoring(subject)._asdict(), separators=(",", ":"))
    return hashlib.sha256("\n".join([model, *settings, *srcs, "", *refs]).encode("utf-8", "replace")).hexdigest()[:16]
