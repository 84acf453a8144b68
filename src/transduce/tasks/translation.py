"""The task translation: learn from sentence pairs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import torch
from sacrebleu.metrics import CHRF
from torch import nn

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import Settings
from transduce.data.clean import Cleaner, format_cleaning, n_pairs, pack_pairs
from transduce.data.copies import CaseCopies, Copies
from transduce.data.encoding import EncodePairs, counted, encode_pairs
from transduce.data.leaks import LeakCheck
from transduce.data.pairs import Pair
from transduce.data.preparation import PairTexts, ScoredSet, TextSet
from transduce.data.store import TokenStore
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.evaluation.evaluate import (
    Evaluation,
    TranslationEvaluation,
    evaluate_translations,
    in_direction,
    score_translator,
)
from transduce.evaluation.metrics import Scoring, TranslationScores, evaluate
from transduce.evaluation.run_record import save_set
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import seal_folder
from transduce.tasks.base import PAIRS, Prepared, Task, ToDraw, fingerprint, report_leaks
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import PairFeeder, SubwordSampling
from transduce.training.loss import Criterion, PredictConsistently, predict_tokens, predict_tokens_and_links
from transduce.training.validate import Judge, Validator

N_SAMPLES = 24  # translations per set in the report
DRAWN_WORDS = (6, 16)  # fewest and most words of sentences with attention maps in the report


class TranslationTask(Task[PairTexts, TokenStore]):
    """Trains a translator on sentence pairs; evaluated by BLEU and chrF."""

    name = "translation"
    form = PAIRS
    store = TokenStore
    evaluation = TranslationEvaluation

    def prepare(self, folder: RunFolder, texts: PairTexts, tokenizers: Tokenizers, log: Log) -> Prepared[TokenStore]:
        settings, tokens, cleaned = folder.settings, folder.path / "tokens", texts.cleaned
        data, mark = settings.data, fingerprint(settings, tokenizers, texts.marks)
        sets = [*(texts.valid_sets if data.valid else ()), *texts.tests]
        checks = [
            LeakCheck(held.name, map(self.form.example, held.read()), places=[pair.where for pair in held.read()])
            for held in sets
        ]
        tokens.mkdir(exist_ok=True)
        copies, directions = None, [corpus.source.direction for corpus in texts.windows]
        if data.both_directions:
            directions += [(tgt, src) for src, tgt in directions]
        if tokenizers.have_placeholders:
            copies = Copies.learn(tokenizers.unframed(), texts.sample, seed=settings.training.seed)
        function = EncodePairs(
            tokenizers,
            data,
            directions,
            first_reversed=len(cleaned) // 2 if data.both_directions else sys.maxsize,
            without=frozenset(cleaned[0].without),
            held_out=frozenset[bytes]().union(*(check.keys for check in checks)),
            aligned=settings.training.guided_alignment is not None,
            copies=copies,
            case=CaseCopies.of(settings),
        )
        n_read = max(1, texts.report.read * (1 + data.both_directions))
        with log.progress("encoding") as bar:
            train = encode_pairs(
                tokens / "train",
                [counted(corpus.records(), lambda n: bar.update(n / n_read), n_pairs) for corpus in cleaned],
                function,
                report=texts.report,
                key=f"{mark}, {cleaned[-1].numbers.stop} chunks",
                checks=checks,
                workplace=texts.workplace,
            )
        cleaner = Cleaner(data)
        function = EncodePairs(tokenizers, data, [held.direction for held in texts.valid_sets])
        kept = [
            list(pack_pairs(filter(None, map(cleaner.by_rules, held.read())), corpus=number))
            for number, held in enumerate(texts.valid_sets)
        ]
        valid = encode_pairs(tokens / "valid", kept, function, report=cleaner.report, name="validation text")
        write_json(tokens / "scored_pairs.json", list(map(ScoredSet.of, texts.valid_sets)))
        write_json(tokens / "tests.json", list(map(ScoredSet.of, texts.tests)))
        folder.save_tokenizers(tokenizers.save)
        cleaning = train.facts["cleaning"]
        for line in format_cleaning(cleaning):
            log.say(line)
        if cleaning["dropped"] or cleaning["changed"]:
            log.say(f"  more examples: {folder.path / 'data.json'} and, after training, report.html")
        described = [_described(texts.train, train), _described(texts.valid, valid)]
        described += [{"name": test.name, "files": test.files, "pairs": test.size} for test in texts.tests]
        seal_folder(tokens)
        folder.write_record("data.json", {"fingerprint": mark, "sets": described, "leaks": report_leaks(checks, log)})
        return Prepared(tokens, tokenizers, train, valid)

    def loss(self, settings: Settings) -> Criterion:
        if (consistency := settings.training.consistency) is not None:
            return PredictConsistently(consistency)
        if settings.training.guided_alignment is None:
            return predict_tokens
        assert isinstance(settings.model, TransformerSettings), "checked by `check`"
        return predict_tokens_and_links(settings.model, weight=settings.training.guided_weight)

    def batches(self, prepared: Prepared[TokenStore], settings: Settings, device: torch.device) -> PairFeeder:
        training, amount = settings.training, settings.tokenizer.sampling
        segment = None
        if amount:
            segment = SubwordSampling(prepared.tokenizers, amount, training.seed, settings.data.max_length)
        data = settings.data
        by_corpus = [corpus.weight for corpus in data.train] * (1 + data.both_directions)
        weights = None if data.demo else prepared.train.weights(by_corpus, temperature=data.temperature)
        return PairFeeder(prepared.train, training, device=device, weights=weights, segment=segment)

    def validate(
        self, model: nn.Module, prepared: Prepared[TokenStore], settings: Settings, device: torch.device
    ) -> Validator:
        training = settings.training
        scored = _read_scored(prepared.tokens / "scored_pairs.json", training.valid_bleu_sentences)
        judge = _judge(prepared.tokenizers, scored, settings) if scored else None
        return Validator(
            model,
            PairFeeder(prepared.valid, training, device=device).batches,
            smoothing=training.label_smoothing,
            judge=judge,
            precision=training.precision,
        )

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> ToDraw:
        tokens = folder.path / "tokens"
        scored = _read_scored(tokens / "scored_pairs.json", folder.settings.training.valid_bleu_sentences)
        sets = _read_scored(tokens / "tests.json") or scored
        translator = Translator.load(folder.path, device=folder.settings.training.device)
        for held in sets:
            log.say(f"{held.name}:")
            for line in _score(folder, held, translator=translator, update=update).lines():
                log.say(f"  {line}")
        if not sets:
            log.say("nothing was scored: no test text, and training.valid_bleu_sentences = 0")
            log.say(f"to score the run later, evaluate {folder.path} on a source and a reference text")
        return _sentences_to_draw(sets)

    def evaluate(self, run: Path, options: TranslationEvaluation, *, device: str = "auto") -> Evaluation:
        return evaluate_translations(run, options, device=device)


def _judge(tokenizers: Tokenizers, sets: Sequence[ScoredSet], settings: Settings) -> Judge:
    """Return the `Judge` that scores translations: the mean BLEU and chrF of all sets, and each BLEU if several."""
    by_length = [sorted(held.pairs, key=lambda pair: len(pair[0])) for held in sets]
    items = [(number, src) for number, pairs in enumerate(by_length) for src, _ in pairs]
    references = [ref for pairs in by_length for _, ref in pairs]
    search, limit = settings.decoding, settings.model.position_limit
    training = settings.training
    # a search needs no more memory than an update
    most = max(1, (training.micro_batch_tokens or training.batch_tokens or search.batch_tokens) // search.beam)

    @cache  # cached: all validations reuse the translator and its threads
    def translator_of(model: nn.Module) -> Translator:
        return Translator(TorchEngine(model), tokenizers, settings=search, data=settings.data, position_limit=limit)

    def translate(model: nn.Module, given: Iterable[tuple[int, str]]) -> list[str]:
        outputs = list[str]()
        for number, group in groupby(given, key=itemgetter(0)):
            translator = in_direction(translator_of(model), sets[number].direction)
            translations = translator.translate([src for _, src in group], batch_tokens=min(most, search.batch_tokens))
            outputs += [translation.text for translation in translations]
        return outputs

    def score(hypotheses: Sequence[str]) -> dict[str, float]:
        rest, scores = zip(hypotheses, references, strict=True), dict[str, TranslationScores]()
        for held in sets:
            ours, refs = zip(*islice(rest, len(held.pairs)), strict=True)
            scores["-".join(held.direction)] = evaluate(ours, refs, **Scoring.of(settings, held.direction[1])._asdict())
        means = {
            "bleu": fmean(each.bleu.value for each in scores.values()),
            "chrf": fmean(each.chrf.value for each in scores.values()),
        }
        return means | {f"bleu {name}": each.bleu.value for name, each in scores.items() if len(scores) > 1}

    return Judge(items=lambda: items, outputs=translate, score=score)


def _score(folder: RunFolder, held: ScoredSet, *, translator: Translator, update: int) -> TranslationScores:
    """Translate and score one held-out set; save its scores and samples in the run folder."""
    search, (name, direction, pairs) = folder.settings.decoding, held
    translator = in_direction(translator, direction)
    scores, hypotheses = score_translator(translator, pairs, Scoring.of(folder.settings, direction[1]))
    scores = replace(scores, notes=(*translator.direction_notes(), *scores.notes))
    options = {"beam": search.beam, "length_penalty": search.length_penalty, "precision": translator.choice.precision}
    save_set(folder, "scores", name, {"scores": scores.to_json(), "search": options})
    samples = [{"src": src, "ref": ref, "hyp": hyp} for (src, ref), hyp in zip(pairs, hypotheses, strict=True)]
    wrong = [sample for sample in samples if sample["ref"] != sample["hyp"]]
    chrf = CHRF()
    wrong.sort(key=lambda sample: chrf.sentence_score(sample["hyp"], [sample["ref"]]).score)
    save_set(
        folder, "samples", name, {"update": update, "samples": samples[:N_SAMPLES], "worst": wrong[: N_SAMPLES // 2]}
    )
    return scores


def _sentences_to_draw(sets: Sequence[ScoredSet]) -> ToDraw:
    """Choose source sentences whose length suits an attention map; if there are none, return all sentences."""
    fewest, most = DRAWN_WORDS
    sources = [(held.direction, src) for held in sets for src, _ in held.pairs if src.strip()]
    return [(direction, src) for direction, src in sources if fewest <= len(src.split()) <= most] or sources


def _read_scored(path: Path, n: int | None = None) -> list[ScoredSet]:
    """Read the sets in a JSON file: about `n` pairs in all, the first pairs of each set (default: all pairs)."""
    with expecting(path):
        sets = read_json(path)
        most = None if n is None else -(-n // len(sets))
        read = [
            ScoredSet(name, (src_lang, tgt_lang), [(src, tgt) for src, tgt in pairs[:most]])
            for name, (src_lang, tgt_lang), pairs in sets
        ]
        return [held for held in read if held.pairs]


def _described(text_set: TextSet[Pair], store: TokenStore) -> dict[str, object]:
    numbers = {"pairs": len(store), "src_tokens": len(store.src), "tgt_tokens": len(store.tgt)}
    return {"name": text_set.name, "files": text_set.files, **numbers, "cleaning": store.facts["cleaning"]}
