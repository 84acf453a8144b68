"""The table of tasks, and functions that check the settings of a user and complete them.

Settings that cannot work or have no effect are refused before any work is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from transduce.config.architectures import BertSettings, TransformerSettings, kinds_for, resolve_preset
from transduce.config.extensions import load_extensions
from transduce.config.model import ModelSettings, OutputSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.lines import bare_suffix, format_path
from transduce.data.pairs import infer_languages
from transduce.data.preparation import N_ENCODED, LabelledTexts, PairTexts, Texts
from transduce.errors import SettingsError, VocabularyTooSmall, check_known, nearest
from transduce.evaluation.metrics import Scoring, metrics
from transduce.logging import Log
from transduce.machine import Machine
from transduce.metrics_log import check_trackers
from transduce.models.registry import ARCHITECTURES, check_model
from transduce.tasks.base import AnyTask
from transduce.tasks.causal import CausalTask
from transduce.tasks.classification import ClassificationTask
from transduce.tasks.defaults import BERT_CLASSIFICATION, DEFAULTS, FINE_TUNING, Facts, Rules, choose, format_choices
from transduce.tasks.masked import MaskedTask
from transduce.tasks.translation import TranslationTask
from transduce.text.sentences import n_sentences
from transduce.text.special import Framing
from transduce.text.tokenizer import Tokenizers, check_directions
from transduce.text.training import SOURCE_FRAMES, language_codes, train_tokenizers, with_language_tokens
from transduce.text.vectors import VectorReader, is_vectors
from transduce.training.optim import OPTIMIZERS
from transduce.training.schedule import SCHEDULES

TASKS: dict[str, AnyTask] = {
    task.name: task for task in (TranslationTask(), CausalTask(), MaskedTask(), ClassificationTask())
}
Lines = Callable[[], tuple[Iterable[str], Iterable[str]]]
"""Function that returns the lines of both sides of the training text; without a target, the second is empty."""


def find_task(name: str) -> AnyTask:
    """Return a task by name. Raises `SettingsError` for an unknown name."""
    if name not in TASKS:
        raise SettingsError(f"task = '{name}'{nearest(name, TASKS)}; allowed: {', '.join(TASKS)}")
    return TASKS[name]


def name_languages(settings: Settings, task: AnyTask, log: Log) -> Settings:
    """Set unset languages to the languages of the first translation memory (TMX) among the training files."""
    data = settings.data
    unnamed = (corpus.path for corpus in data.train if not (corpus.src_lang and corpus.tgt_lang))
    path = next((path for path in unnamed if path and bare_suffix(path) == ".tmx"), None)
    if task.form.name != "pairs" or path is None or (data.src_lang != "src" and data.tgt_lang != "tgt"):
        return settings
    src, tgt = infer_languages(path, data)
    log.say(f"{format_path(path)}: source {src}, target {tgt}; data.src_lang and data.tgt_lang choose others")
    return settings.with_values("data", src_lang=src, tgt_lang=tgt)


def learn_vocabulary(lines: Lines, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    """Train the vocabulary on `lines`. `may_grow`: whether its size may grow if the text has too many characters."""
    size, data = resolved(settings.tokenizer.vocab_size, "tokenizer.vocab_size"), settings.data
    frame = SOURCE_FRAMES[data.languages]
    codes = language_codes(data.directions) if frame else []
    try:
        tokenizers = train_tokenizers(*lines(), settings.tokenizer, vocab_size=max(8, size - len(codes)))
        if codes:
            tokenizers = with_language_tokens(tokenizers, data.directions, src=frame)
    except VocabularyTooSmall as error:
        if not may_grow:
            raise
        size = error.needed + error.needed // 2 + len(codes)
        log.say(f"the text has many different characters: the vocabulary grows to {size:,} pieces")
        return learn_vocabulary(lines, settings.with_values("tokenizer", vocab_size=size), log, may_grow=False)
    n = min(tokenizers.n_src, tokenizers.n_tgt)
    if n < size and not (settings.tokenizer.kind == "char" and settings.tokenizer.exact):  # these have all characters
        report = log.say if may_grow else log.warn  # warn if a size given by the user is not reached
        report(f"vocabulary: {n:,} pieces instead of {size:,}; the text does not support more")
    return tokenizers


_VECTORS: dict[str, Rules] = {
    "pairs": {
        "decoding.split": None,
        "tokenizer.joint": (False, "vectors have no vocabulary"),
        "tokenizer.placeholders": None,
        "data.max_ratio": (1e6, "there may be many more vectors than tokens"),
    },
    "labelled": {"tokenizer.vocab_size": None, "model.pooling": ("mean", "vectors have no [CLS]")},
}
"""Default rules with precedence over the task's rules if the source is vectors, by the form of the text."""


def _learn_target_vocabulary(lines: Lines, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    """Return a reader of source vectors in place of a source vocabulary, and train the vocabulary of target text."""
    names, targets = lines()
    reader = VectorReader.of(names)
    log.say(f"source: vectors of {reader.width:,} numbers")
    if next(iter(targets), None) is None:
        return Tokenizers(reader, reader)
    alone = settings.with_values("tokenizer", normalization=settings.tokenizer.tgt_normalization)
    return Tokenizers(reader, learn_vocabulary(lambda: (lines()[1], ()), alone, log, may_grow=may_grow).tgt)


def facts_of(task: AnyTask, asked: Settings, texts: Texts[Any], machine: Machine) -> Facts:
    """Return the facts on which defaults may depend, before the text is encoded.

    Their settings include the labels. A classifier gets BERT's sizes if it reads pairs of texts, or if the user gave
    model settings.
    """
    defaults, several_sentences = DEFAULTS[task.name], None
    if isinstance(texts, LabelledTexts):
        is_described = asked.model.model_fields_set - {"kind", "dropout", "n_labels"}
        if len(texts.sample[0]) > 1 or is_described:
            defaults = BERT_CLASSIFICATION
        asked = asked.with_values("data", labels=list(texts.labels))
        asked = asked.with_values("model", n_labels=len(texts.labels))
    if isinstance(texts, PairTexts) and texts.sample:
        several = [n_sentences(pair[0], asked.data.src_lang) > 1 for pair in texts.sample[:N_ENCODED]]
        several_sentences = sum(several) / len(several)
    return Facts(
        asked=asked,
        settings=asked,
        machine=machine,
        sizes=defaults.sizes,
        amount=texts.train.size,
        unit=task.form.unit,
        several_sentences=several_sentences,
    )


def resolve(
    task: AnyTask,
    asked: Settings,
    texts: Texts[Any],
    machine: Machine,
    log: Log,
    *,
    known: Tokenizers | None = None,
    scale: float = 1.0,
) -> tuple[Settings, Tokenizers]:
    """Choose defaults for unset settings, print them, and train the vocabulary, on which later defaults depend.

    Returns the complete settings and the vocabulary. `known`: a vocabulary to use instead of training one. `scale`:
    amount of text relative to `texts`, if `texts` are a sample.
    """
    log.say(f"machine: {machine.describe()}")
    facts, defaults = facts_of(task, asked, texts, machine), DEFAULTS[task.name]
    facts = replace(facts, amount=round(facts.amount * scale))
    rules = defaults.before_text
    if asked.model.reads_vectors:
        own = _VECTORS[task.form.name]
        rules = {**own, **rules, **own}  # these rules come first, with these values
    settings, choices = choose(facts, rules)
    settings = settings.model_copy(update={"model": resolve_preset(settings.model)})
    check(settings)
    may_grow = asked.tokenizer.vocab_size is None
    learn = _learn_target_vocabulary if settings.model.reads_vectors else learn_vocabulary
    tokenizers = known or learn(texts.lines, settings, log, may_grow=may_grow)
    if tokenizers.src.reads_text == settings.model.reads_vectors:
        read = "text" if settings.model.reads_vectors else "vectors"
        raise SettingsError(
            f"tokenizer.start = '{settings.tokenizer.start}': the source of that run is {read}, unlike model.source; "
            "name another run"
        )
    tokenizers = tokenizers.trained_on(settings.data.directions)
    sizes = [side.vocab_size for side in (tokenizers.src, tokenizers.tgt) if side.reads_text]
    settings = settings.with_values("tokenizer", vocab_size=max(sizes, default=None))
    tokens = round(texts.count_tokens(tokenizers) * scale)
    rules = defaults.before_training
    if asked.training.start is not None:
        rules = {**rules, **FINE_TUNING}
    settings, more = choose(replace(facts, settings=settings, tokens=tokens), rules)
    if choices or more:
        log.say("defaults for unset settings, each of which can be set:")
        for line in format_choices([*choices, *more], width=log.width):
            log.say(line)
    return Settings.from_mapping(settings.model_dump(mode="json")), tokenizers


def check(settings: Settings) -> AnyTask:
    """Check the settings and return their task. Raises `SettingsError` if they cannot work or have no effect.

    The extensions that the settings name are loaded first.
    """
    load_extensions(settings.extensions)
    task, training, model = find_task(settings.task), settings.training, resolve_preset(settings.model)
    check_model(model)
    check_trackers(training.track)
    if training.optimizer is not None:
        check_known("training.optimizer", training.optimizer, OPTIMIZERS)
    if training.schedule is not None:
        check_known("training.schedule", training.schedule, SCHEDULES)
    for problem in chain(_problems(settings, task, model), _PROBLEMS[task.name](settings, model)):
        raise SettingsError(problem)
    if training.lora is not None and training.start is None:
        raise SettingsError(
            "training.lora: there are no weights to adapt; name the run to fine-tune from",
            *("training.lora", "training.start"),
        )
    return task


def _problems(settings: Settings, task: AnyTask, model: ModelSettings) -> Iterator[str]:
    """Yield an error message for each setting that cannot work in any task, or in this task."""
    training, kind = settings.training, model.kind
    if training.start is None:  # otherwise the architecture is inherited
        for problem in ARCHITECTURES[kind].unused(model):
            yield f"{problem}; change one of them"
    if training.optimizer == "muon" and training.parallel == "shard":
        yield (
            "training.optimizer = 'muon': it needs whole matrices, which training.parallel = 'shard' divides; "
            "use adamw or adam"
        )
    given = [f"training.{name}" for name in ("lora", "recompute") if training.is_changed(name)]
    if given and not ARCHITECTURES[kind].of_blocks:
        able = [name for name, architecture in ARCHITECTURES.items() if architecture.of_blocks]
        yield f"{given[0]}: not for model.kind = '{kind}'; models of kind {', '.join(able)} can use it"
    if training.lora is not None and (training.optimizer == "muon" or training.parallel == "shard"):
        yield (
            "training.lora: adapters are trained by training.optimizer = 'adamw' or 'adam', with training.parallel = "
            "'replicate'; leave both out"
        )
    if kind not in (kinds := kinds_for(task.name)):
        yield f"model.kind = '{kind}' does not fit task '{task.name}'; use {' or '.join(kinds)}"
    for name, traits in settings.traits():
        section, _, key = name.rpartition(".")
        if traits.tasks and task.name not in traits.tasks and getattr(settings, section).is_changed(key):
            yield f"{name} has no effect in task '{task.name}'; leave it out"
    for corpus in settings.data.corpora:
        if corpus.tgt is not None and is_vectors(corpus.tgt):
            yield f"tgt = '{corpus.tgt}': a file of vectors; only a source can be one"
        for path in filter(None, (corpus.src, corpus.path)):
            if is_vectors(path) and not model.reads_vectors:
                yield f"{path} is a file of vectors; set model.source = 'vectors' to read it"
            # the checksum of a file of names does not cover the vectors
            if model.reads_vectors and not is_vectors(path):
                yield f"{path}: model.source = 'vectors' needs files of vectors (.safetensors)"
        if task.form.name == "pairs":
            continue
        form = "plain text" if task.form.name == "text" else "label<TAB>text"
        if corpus.path is None:
            yield f"task '{task.name}' reads {form}; give path = \"...\", not src and tgt"
        if corpus.src_lang or corpus.tgt_lang:
            yield f"src_lang, tgt_lang: {form} has no sides; leave them out"
        if corpus.weight != 1:
            yield f"weight = {corpus.weight:g}: {form} has no weights; list a file twice instead"


def _context_problems(settings: Settings, model: ModelSettings) -> Iterator[str]:
    context, limit = settings.data.context, model.position_limit
    if context is not None and limit is not None and context > limit:
        yield (
            f"data.context = {context}: more than model.max_positions = {limit} learned positions; "
            "lower the first or raise the second"
        )


def _translation_problems(settings: Settings, model: ModelSettings) -> Iterator[str]:
    assert isinstance(model, OutputSettings)
    tokenizer = settings.tokenizer
    if not tokenizer.joint and model.ties_inputs and "tie" in settings.model.model_fields_set:
        yield f"model.tie = '{model.tie}' needs one vocabulary: set tokenizer.joint = true, or model.tie = 'two_way'"
    if model.reads_vectors:
        for key, neutral in (("joint", False), ("sampling", 0.0)):
            if key in tokenizer.model_fields_set and getattr(tokenizer, key) != neutral:
                yield f"tokenizer.{key}: the source is vectors, which have no tokens; leave it out"
    if (share := settings.data.case_augmentation) and (model.reads_vectors or tokenizer.normalization.endswith("_cf")):
        folded = f"folded by tokenizer.normalization = '{tokenizer.normalization}'"
        reason = "vectors" if model.reads_vectors else folded
        yield f"data.case_augmentation = {share:g}: the source has no case, as it is {reason}; leave it out"
    metrics(*Scoring.of(settings))
    if settings.training.start is settings.tokenizer.start is None:  # otherwise the vocabulary is inherited
        directions, frame = settings.data.directions, SOURCE_FRAMES[settings.data.languages]
        check_directions(settings.data, Framing(dict.fromkeys(language_codes(directions), 0), frame, (), directions))
    guided = settings.training.guided_alignment
    if guided is not None and (problem := _guided_problem(settings, model)):
        yield f"training.guided_alignment = '{guided}': {problem}"
    longest = max(settings.data.max_length, settings.decoding.max_length) + 1
    if model.position_limit is not None and model.position_limit < longest:
        yield (
            f"model.max_positions = {model.position_limit}: must be at least {longest}: one more than "
            "data.max_length and decoding.max_length"
        )


def _guided_problem(settings: Settings, model: ModelSettings) -> str:
    """The reason why guided alignment cannot be trained; empty if it can."""
    if not isinstance(model, TransformerSettings) or model.reads_vectors:
        kind = "vectors as source" if isinstance(model, TransformerSettings) else f"model.kind = '{model.kind}'"
        return f"needs a Transformer that reads text, not {kind}; leave it out"
    if settings.data.demo or len(settings.data.directions) != 1:
        return "needs one training corpus, to which it is parallel; join the files"
    excluded = {
        "training.consistency": settings.training.consistency,
        "training.recompute": settings.training.recompute,  # the second computation of a block is not recorded
        "tokenizer.sampling": settings.tokenizer.sampling,
    }
    other = next((name for name, value in excluded.items() if value), "")
    return other and f"cannot be used with {other}; leave one of them out"


def _causal_problems(settings: Settings, model: ModelSettings) -> Iterator[str]:
    yield from _context_problems(settings, model)
    tokenizer, context, batch = settings.tokenizer, settings.data.context, settings.training.batch_tokens
    if settings.training.start is None:  # otherwise the inherited vocabulary is exact
        for key, needed in (("exact", True), ("normalization", "identity")):
            if key in tokenizer.model_fields_set and (value := getattr(tokenizer, key)) != needed:
                yield f"tokenizer.{key} = {json.dumps(value)}: task 'causal' needs exact text; leave it out"
    if settings.data.separate_documents and not model.separates_documents:
        yield (
            "data.separate_documents = true: this model reads beyond the start of a document; use a Transformer "
            "without model.feed_forward = 'conv'"
        )
    if context not in (None, model.own_context or context):
        yield f"model.segment_length = {model.own_context}: differs from data.context = {context}; set one of them"
    if context is not None and batch is not None and batch < context:
        yield f"training.batch_tokens = {batch}: must be at least data.context = {context}, the tokens of a row"


def _masked_problems(settings: Settings, model: ModelSettings) -> Iterator[str]:
    assert isinstance(model, BertSettings)
    yield from _context_problems(settings, model)
    tokenizer, context = settings.tokenizer, settings.data.context
    if "mask" in tokenizer.model_fields_set and not tokenizer.mask and settings.training.start is None:
        yield "tokenizer.mask = false: task 'masked' needs a piece <mask>; leave it out"
    if model.next_sentence and settings.data.documents == "line":
        yield (
            "model.next_sentence = true with data.documents = 'line': one sentence has no next sentence; "
            "use 'file' or 'blank_line'"
        )
    if model.next_sentence and model.n_segments == 1:
        yield "model.next_sentence = true: model.n_segments must be 2, or 0 for none"
    if context is not None and context < 8:
        yield f"data.context = {context}: must be at least 8"


def _classification_problems(settings: Settings, model: ModelSettings) -> Iterator[str]:
    data, tokenizer = settings.data, settings.tokenizer
    if data.max_length < 8:
        yield f"data.max_length = {data.max_length}: must be at least 8, special tokens included"
    for key in tokenizer.model_fields_set - {"start"} if model.reads_vectors else ():
        if tokenizer.is_changed(key):
            yield f"tokenizer.{key} has no effect with model.source = 'vectors'; leave it out"
    if data.labels is not None and len(set(data.labels)) < max(2, len(data.labels)):
        yield f"data.labels = {list(data.labels)}: must be at least two, all different"


_PROBLEMS: dict[str, Callable[[Settings, ModelSettings], Iterator[str]]] = {
    "translation": _translation_problems,
    "causal": _causal_problems,
    "masked": _masked_problems,
    "classification": _classification_problems,
}
"""Functions by task that yield an error message for each setting that cannot work or has no effect in the task.

The model settings that they get have the sizes of their preset.
"""
