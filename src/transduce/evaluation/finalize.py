"""The end of a training: scores of the test sets, samples, attention, the report and the model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import islice

from transduce.decoding.translator import Translator
from transduce.evaluation.card import write_card
from transduce.evaluation.metrics import Scores
from transduce.evaluation.report import write_report
from transduce.evaluation.result_files import Wording, save_attention, save_set
from transduce.evaluation.translations import format_precisions, measure_precisions, score_translator
from transduce.inspection.attention import attention_of
from transduce.logging import Log
from transduce.runs.folder import RunFolder

LOG = "metrics.jsonl"
N_SAMPLES = 24  # translations per set in the report
N_DRAWN, DRAWN_WORDS = 3, (6, 16)  # sentences with attention maps in the report, and their fewest and most words


def finalize_translation(
    folder: RunFolder,
    sets: Mapping[str, Sequence[tuple[str, str]]],
    wording: Wording,
    *,
    validation: Sequence[tuple[str, str]],
    update: int,
    log: Log,
) -> None:
    """Score a translator on sets of pairs, measure its precisions on validation pairs, and finalize the run.

    `update` is the one whose weights are kept. After a kill everything here is done again.
    """
    settings = folder.settings
    translator = Translator.load(folder.path, device=settings.training.device)
    for name, found in sets.items():
        scores = _score(folder, name, found, translator=translator, update=update)
        log.say(f"{name}:")
        for line in scores.lines():
            log.say(f"  {line}")
    if not sets:
        log.say("nothing was scored: no test text, and training.valid_bleu_sentences = 0")
        log.say(f"to score the run later, evaluate {folder.path} on a source and a reference text")
    else:
        held_out = [src for found in sets.values() for src, _ in found]
        save_attention(folder, [attention_of(translator, src) for src in _choose_for_attention(held_out, translator)])
    if validation:
        precisions = measure_precisions(folder, validation, log)
        if not isinstance(precisions, str):
            folder.write_record("precision_scores.json", {"sentences": len(validation), "precisions": precisions})
            for line in format_precisions(precisions):
                log.say(f"valid, {line}")
    finalize(folder, wording, log)


def finalize(folder: RunFolder, wording: Wording, log: Log) -> None:
    """Write the report and the model card, seal the log with a checksum and delete the encoded text."""
    if (folder.path / LOG).exists():
        folder.manifest.add(folder.manifest.records, LOG)
    write_report(folder, wording)
    write_card(folder, wording)
    unused = folder.path / ".tokens.done.aside"  # after a kill, the next start removes the rest
    (folder.path / "tokens").rename(unused)  # from here on the run is finished
    shutil.rmtree(unused, ignore_errors=True)
    log.say(f"run folder: {folder.path}    report: {folder.path / 'report.html'}")


def restore_pages(folder: RunFolder, wording: Wording, *, log: Log) -> None:
    """Write the report and the card of a finished run again if they are missing."""
    for name, write in (("report.html", write_report), ("README.md", write_card)):
        if not (folder.path / name).exists():
            write(folder, wording)
            log.say(f"rewritten: {folder.path / name}")


def _score(
    folder: RunFolder, name: str, pairs: Sequence[tuple[str, str]], *, translator: Translator, update: int
) -> Scores:
    """Translate and score one set; save scores and samples."""
    search = folder.settings.decoding
    scores, hypotheses = score_translator(translator, pairs, folder.settings.evaluation)
    options = {"beam": search.beam, "length_penalty": search.length_penalty, "precision": translator.choice.precision}
    save_set(folder, "scores", name, {"scores": scores.to_json(), "search": options})
    some = list(zip(pairs, hypotheses, strict=True))[:N_SAMPLES]
    samples = [{"src": src, "ref": ref, "hyp": hyp} for (src, ref), hyp in some]
    save_set(folder, "samples", name, {"update": update, "samples": samples})
    return scores


def _choose_for_attention(sources: Sequence[str], translator: Translator) -> list[str]:
    """Return the first few sentences of suitable length, or else the first few that the model takes."""
    fewest, most = DRAWN_WORDS
    fitting = [src for src in sources if fewest <= len(src.split()) <= most]
    taken = (
        src
        for src in fitting or sources
        if src.strip() and len(translator.tokenizers.src.encode(src)) <= translator.longest
    )
    return list(islice(taken, N_DRAWN))
