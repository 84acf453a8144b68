"""Translation of sentence pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.architectures import TransformerSettings
from transduce.config.decoding import DecodingSettings
from transduce.config.model import ModelSettings, OutputSettings
from transduce.config.settings import EvaluationSettings, Settings
from transduce.data.clean import Cleaner, format_cleaning
from transduce.data.cleaned_pairs import n_pairs, pack_pairs
from transduce.data.corpus import Pair
from transduce.data.encoding import EncodePairs, counted, encode_pairs
from transduce.data.leaks import LeakCheck
from transduce.data.preparation import PairTexts, TextSet, read_pair_texts, read_scored_pairs
from transduce.data.sources import Sources, pair_sources
from transduce.data.store import AlignedStore, TokenStore
from transduce.data.word_links import with_links
from transduce.decoding.torch_engine import TorchEngine
from transduce.decoding.translator import Translator
from transduce.demo.corpus import demo_sources
from transduce.errors import SettingsError
from transduce.evaluation.evaluate import Evaluation, evaluate_translations, measure_precisions, score_translator
from transduce.evaluation.metrics import Scores, evaluate, format_precisions, metrics
from transduce.evaluation.options import TranslationEvaluation
from transduce.evaluation.result_files import Wording, save_attention, save_set
from transduce.evaluation.scored_models import ScoredTranslator
from transduce.inspection.look import inspect
from transduce.inspection.subjects import MOST_TOKENS
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import seal_folder
from transduce.tasks.base import TRIED, Prepared, Task, Validation, n_rows_for, report_leaks
from transduce.tasks.defaults import MODEL, PRE_NORM, TRAINING, Defaults, Size, for_vectors
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.feed import PairFeeder, SubwordSampling
from transduce.training.loss import Criterion, predict_tokens, predict_tokens_and_links
from transduce.training.validate import Judge

N_SAMPLES = 24  # translations per set in the report
N_DRAWN, DRAWN_WORDS = 3, (6, 16)  # sentences with attention maps in the report, and their fewest and most words


TRANSLATION = Defaults(
    tuple(
        Size(most=n, vocab_size=v, preset=preset, dropout=dropout, batch=batch, epochs=epochs, minutes=minutes)
        for n, v, preset, dropout, batch, epochs, minutes in (
            (2_000, 2_000, ("tiny", "tiny"), 0.3, (1024, 1024), 60, (10, 5)),
            (20_000, 4_000, ("tiny", "tiny"), 0.3, (2048, 2048), 40, (20, 10)),
            (50_000, 8_000, ("tiny", "small"), 0.2, (2048, 4096), 20, (30, 20)),
            (150_000, 8_000, ("small", "small"), 0.2, (4096, 8192), 20, (90, 30)),
            (1_000_000, 16_000, ("small", "base"), 0.1, (8192, 24_576), 15, (360, 240)),
            (math.inf, 32_000, ("small", "base"), 0.1, (8192, 32_768), 10, (1440, 1440)),
        )
    ),
    {
        "tokenizer.joint": for_vectors(False, "vectors have no vocabulary"),
        **MODEL,
        "data.max_ratio": for_vectors(1e6, "there may be many more vectors than tokens"),
        "model.residual": PRE_NORM,
        "model.tie": lambda facts: (
            None if facts.settings.tokenizer.joint else ("two_way", "each side has a vocabulary")
        ),
    },
    TRAINING,
)


def _sources(settings: Settings) -> Sources[Pair]:
    """The sentence pairs that the settings name."""
    n, links = settings.data.demo, settings.training.guided_alignment
    if n:
        return demo_sources(n, seed=settings.training.seed)
    found = pair_sources(settings)
    return found if links is None else replace(found, train=(with_links(found.train[0], links),))


def _scored_model(folder: RunFolder) -> ScoredTranslator:
    return ScoredTranslator(folder, read_scored_pairs(_sources(folder.settings)))


class TranslationTask(Task[PairTexts, TokenStore]):
    """Trains a translator on sentence pairs; evaluated by BLEU and chrF."""

    name = "translation"
    wording = Wording(
        title="A translator from `{src}` to `{tgt}`",
        does="translates {input_text}",
        command="transduce translate THIS_FOLDER {input} > out.txt",
        python="Translator.load(FOLDER).translate([{example}])[0].text",
        samples="Translations",
        shape="{src} to {tgt} · {model}",
        limits=(
            "It translates each {text} separately and does not see the others.",
            "It was trained on up to {max_length} {tokens} at once and writes up to {output_length} tokens.",
        ),
    )
    inherited = (
        *("data.src_lang", "data.tgt_lang"),
        *(f"decoding.{key}" for key in DecodingSettings.model_fields),
    )
    reads = "pairs"
    unit = "sentence pairs"
    sources = staticmethod(_sources)
    read_texts = staticmethod(read_pair_texts)
    scored_model = staticmethod(_scored_model)
    defaults = TRANSLATION
    store = TokenStore
    uses = frozenset(
        {
            *(
                f"data.{key}"
                for key in ("src_lang", "tgt_lang", "max_length", "max_ratio", "deduplicate", "drop_copies", "workers")
            ),
            *(f"tokenizer.{key}" for key in ("joint", "sampling", "exact")),
            *(f"training.{key}" for key in ("valid_bleu_sentences", "guided_alignment", "guided_weight")),
            *(f"decoding.{key}" for key in DecodingSettings.model_fields),
            *(f"evaluation.{key}" for key in EvaluationSettings.model_fields),
        }
    )

    def check(self, settings: Settings, model: ModelSettings) -> None:
        assert isinstance(model, OutputSettings)
        if not settings.tokenizer.joint and model.tie == "three_way" and "tie" in settings.model.model_fields_set:
            raise SettingsError(
                "model.tie = 'three_way' needs one vocabulary: set tokenizer.joint = true, or model.tie = 'two_way'"
            )
        if model.reads_vectors:
            tokenizer = settings.tokenizer
            for key, neutral in (("joint", False), ("sampling", 0.0)):
                if key in tokenizer.model_fields_set and getattr(tokenizer, key) != neutral:
                    raise SettingsError(f"tokenizer.{key}: the source is vectors, which have no tokens; leave it out")
        if settings.tokenizer.exact:
            raise SettingsError("tokenizer.exact = true: only for running text; leave it out")
        metrics(settings.evaluation.tokenize, settings.evaluation.lowercase)
        if settings.training.guided_alignment is not None:
            _check_guided(settings, model)
        longest = max(settings.data.max_length, settings.decoding.max_length) + 1
        if model.position_limit is not None and model.position_limit < longest:
            raise SettingsError(
                f"model.max_positions = {model.position_limit}: must be at least {longest}: one more than "
                "data.max_length and decoding.max_length"
            )

    def lines(self, texts: PairTexts) -> tuple[Iterator[str], Iterator[str]]:
        return (pair[0] for pair in texts.sample), (pair[1] for pair in texts.sample)

    def count_tokens(self, texts: PairTexts, tokenizers: Tokenizers) -> int:
        pairs = texts.sample[: min(TRIED, tokenizers.src.chunk)]
        sides = (tokenizers.src.encode_batch([p[0] for p in pairs]), tokenizers.tgt.encode_batch([p[1] for p in pairs]))
        longer = [1 + max(len(src), len(tgt)) for src, tgt in zip(*sides, strict=True)]
        return round(sum(longer) * texts.train.size / max(1, len(longer)))

    def encode(
        self, folder: RunFolder, texts: PairTexts, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> Prepared[TokenStore]:
        data, tokens, cleaned, place = settings.data, folder.path / "tokens", texts.cleaned, texts.place
        mark = self.fingerprint(settings, tokenizers, texts.marks)
        sets = [(found, list(found.read())) for found in (texts.valid, *texts.tests)]
        checks = [
            LeakCheck(found.name, map(_sides, pairs), places=[pair.where for pair in pairs])
            for found, pairs in sets[0 if data.valid else 1 :]
        ]
        tokens.mkdir(exist_ok=True)
        function = EncodePairs(
            tokenizers,
            data,
            without=frozenset(cleaned[0].without),
            held_out=frozenset[bytes]().union(*(check.keys for check in checks)),
            aligned=settings.training.guided_alignment is not None,
        )
        n_read = max(1, texts.report.read)
        with log.progress("encoding") as bar:
            train = encode_pairs(
                tokens / "train",
                [counted(one.records(), lambda n: bar.update(n / n_read), n_pairs) for one in cleaned],
                function,
                report=texts.report,
                key=f"{mark}, {cleaned[-1].numbers.stop} chunks",
                checks=checks,
                place=place,
            )
        cleaner, function = Cleaner(data), EncodePairs(tokenizers, data)
        kept = list(pack_pairs(filter(None, map(cleaner.by_rules, sets[0][1]))))
        valid = encode_pairs(tokens / "valid", [kept], function, report=cleaner.report, name="validation text")
        n_scored = settings.training.valid_bleu_sentences
        write_json(tokens / "scored_pairs.json", [_sides(pair) for pair in sets[0][1][:n_scored]])
        write_json(tokens / "tests.json", [(found.name, list(map(_sides, pairs))) for found, pairs in sets[1:]])
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

    def open_prepared(self, folder: RunFolder) -> Prepared[TokenStore]:
        if folder.settings.training.guided_alignment is None:
            return super().open_prepared(folder)
        tokens = folder.path / "tokens"
        train, valid = AlignedStore.open(tokens / "train"), TokenStore.open(tokens / "valid")
        return Prepared(tokens, load_tokenizers(folder), train, valid)

    def criterion(self, settings: Settings) -> Criterion:
        if settings.training.guided_alignment is None:
            return predict_tokens
        assert isinstance(settings.model, TransformerSettings), "checked by `check`"
        return predict_tokens_and_links(settings.model, weight=settings.training.guided_weight)

    def feeder(self, prepared: Prepared[TokenStore], settings: Settings, device: torch.device) -> PairFeeder:
        training, amount = settings.training, settings.tokenizer.sampling
        segment = None
        if amount:
            segment = SubwordSampling(prepared.tokenizers, amount, training.seed, settings.data.max_length)
        weights = None if settings.data.demo else prepared.train.weights([c.weight for c in settings.data.train])
        return PairFeeder(prepared.train, training, device=device, weights=weights, segment=segment)

    def longest_rows(self, prepared: Prepared[TokenStore], settings: Settings) -> Prepared[TokenStore]:
        length = settings.data.max_length
        n = n_rows_for(length, settings)
        sides = [np.resize(ids[:length], length).tolist() for ids in (prepared.train.src, prepared.train.tgt)]
        return replace(prepared, train=TokenStore.from_lists([sides[0]] * n, [sides[1]] * n))

    def validation(self, prepared: Prepared[TokenStore], settings: Settings, device: torch.device) -> Validation:
        scored_pairs = _read_scored_pairs(prepared.tokens)
        judge = _judge(prepared.tokenizers, scored_pairs, settings) if scored_pairs else None
        return Validation(PairFeeder(prepared.valid, settings.training, device=device).batches, judge=judge)

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        path = folder.path / "tokens" / "tests.json"
        with expecting(path):
            sets = {str(name): _pairs(pairs) for name, pairs in read_json(path)}
        scored_pairs = _read_scored_pairs(path.parent)
        if not sets and scored_pairs:
            sets = {"valid": scored_pairs}
        translator = Translator.load(folder.path, device=folder.settings.training.device)
        for name, pairs in sets.items():
            log.say(f"{name}:")
            for line in _score(folder, name, pairs, translator=translator, update=update).lines():
                log.say(f"  {line}")
        if not sets:
            log.say("nothing was scored: no test text, and training.valid_bleu_sentences = 0")
            log.say(f"to score the run later, evaluate {folder.path} on a source and a reference text")
        else:
            held_out = [src for pairs in sets.values() for src, _ in pairs]
            chosen = _choose_for_attention(held_out, translator)
            save_attention(folder, [inspect(translator, src) for src in chosen])
        if scored_pairs:
            precisions = measure_precisions(folder, scored_pairs, log)
            if not isinstance(precisions, str):
                record = {"sentences": len(scored_pairs), "precisions": precisions}
                folder.write_record("precision_scores.json", record)
                for line in format_precisions(precisions):
                    log.say(f"valid, {line}")

    def evaluate(self, run: Path, options: TranslationEvaluation, *, device: str = "auto") -> Evaluation:
        return evaluate_translations(run, options, device=device)


def _check_guided(settings: Settings, model: ModelSettings) -> None:
    """Refuse what guided alignment cannot be trained with."""
    given = f"training.guided_alignment = '{settings.training.guided_alignment}'"
    if not isinstance(model, TransformerSettings) or model.reads_vectors:
        kind = "vectors as source" if isinstance(model, TransformerSettings) else f"model.kind = '{model.kind}'"
        raise SettingsError(f"{given}: needs a Transformer that reads text, not {kind}; leave it out")
    if settings.data.demo or len(settings.data.train) != 1:
        raise SettingsError(f"{given}: needs one training corpus, to which it is parallel; join the files")
    if sampling := settings.tokenizer.sampling:
        raise SettingsError(f"{given}: cannot be used with tokenizer.sampling = {sampling}; leave one of them out")


def _judge(tokenizers: Tokenizers, scored_pairs: Sequence[tuple[str, str]], settings: Settings) -> Judge:
    pairs, scoring = sorted(scored_pairs, key=lambda pair: len(pair[0])), settings.evaluation
    limit = settings.model.position_limit

    @cache  # all validations reuse the translator's threads
    def translator_of(model: nn.Module) -> Translator:
        return Translator(TorchEngine(model), tokenizers, settings=settings.decoding, position_limit=limit)

    def translate(model: nn.Module, sources: Iterable[str]) -> list[str]:
        return [found.text for found in translator_of(model).translate(sources)]

    def score(hypotheses: Sequence[str]) -> dict[str, float]:
        scores = evaluate(hypotheses, [ref for _, ref in pairs], tokenize=scoring.tokenize, lowercase=scoring.lowercase)
        return {"bleu": scores.bleu.value, "chrf": scores.chrf.value}

    return Judge(items=lambda: [src for src, _ in pairs], outputs=translate, score=score)


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
        if src.strip() and len(translator.tokenizers.src.encode(src)) <= min(translator.longest, MOST_TOKENS)
    )
    return list(islice(taken, N_DRAWN))


def _read_scored_pairs(tokens: Path) -> list[tuple[str, str]]:
    with expecting(tokens / "scored_pairs.json"):
        return _pairs(read_json(tokens / "scored_pairs.json"))


def _pairs(found: Any) -> list[tuple[str, str]]:
    """Pairs of texts from JSON. Raises `ValueError` for anything else."""
    pairs = [(src, tgt) for src, tgt in found]
    if not all(isinstance(side, str) for pair in pairs for side in pair):
        raise ValueError("expected pairs of texts")
    return pairs


def _sides(pair: Pair) -> tuple[str, str]:
    return pair.src, pair.tgt


def _described(found: TextSet[Pair], store: TokenStore) -> dict[str, object]:
    numbers = {"pairs": len(store), "src_tokens": len(store.src), "tgt_tokens": len(store.tgt)}
    return {"name": found.name, "files": found.files, **numbers, "cleaning": store.facts["cleaning"]}
