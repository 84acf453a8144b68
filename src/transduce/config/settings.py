"""Settings of a run: frozen, validated, each default written once, each setting explained in one sentence.

TOML in (a recipe), JSON out (`config.json` of the run folder). An unknown key is refused with the nearest known one.
`None` means "choose from the data and the machine"; `transduce.tasks.resolve` fills it in and says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model, model_validator

from transduce.config.architectures import AnyModelSettings, TransformerSettings, default_kind
from transduce.config.decoding import DecodingSettings
from transduce.config.recipe import apply_overrides, read_recipe
from transduce.config.section import (
    MAX_BATCH,
    MAX_BEAM,
    MAX_SEED,
    MAX_STEPS,
    MAX_VOCAB,
    Below1,
    Section,
    Share,
    Tokens,
    Traits,
    explain,
    name_in,
    setting,
    traits_of,
)
from transduce.errors import SettingsError

Normalization = Literal["nfc", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"]
Average = Literal["none", "last", "best", "ema"]
TrainingPrecision = Literal["auto", "float32", "bfloat16"]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Count = Annotated[int, Field(ge=0, le=MAX_STEPS)]

_PAIRS = ("translation",)
_TEXT = ("causal", "masked")
_LABELS = ("classification",)
_OWN = Traits(own=True)
_CHANGEABLE = Traits(changeable="freely")
_RECORDED = Traits(changeable="recorded")
_SHARED = Traits(shared=True)
_LIMIT = Traits(shared=True, changeable="recorded")
_CLEANING = Traits(tasks=_PAIRS, stored=True)
_LANGUAGE = Traits(tasks=_PAIRS, stored=True, inherited=_PAIRS)
_OF_PAIRS = Traits(tasks=_PAIRS)
_OF_MASKED = Traits(tasks=("masked",))
_LONGEST = Traits(tasks=_PAIRS + _LABELS, stored=True)
_CONTEXT = Traits(tasks=_TEXT, stored=True, inherited=("causal",))
_WORKERS = Traits(tasks=_PAIRS, changeable="freely")

Direction = tuple[str, str]
"""A translation direction: the language codes of the source and of the target."""


def is_remote(path: Path) -> bool:
    """Whether a path was made from an address such as `s3://bucket/a.tsv`, of which `Path` drops a slash."""
    return re.match(r"[a-z][a-z0-9+.-]+:/", path.as_posix()) is not None


class Corpus(Section):
    """One source of text: files `src` and `tgt`, or one `path` with sentence pairs or plain text."""

    src: Path | None = setting(None, "Text file of source sentences, one per line (.gz, .xz, .zst too).")
    tgt: Path | None = setting(None, "Text file of target sentences, line by line parallel to `src`.")
    path: Path | None = setting(None, "One file of pairs (.tsv, .jsonl, ...) or of text (.gz, .xz, .zst too).")
    weight: float = setting(1.0, "Passes over the corpus per epoch: 2 for two, 0.5 for half.", gt=0, le=1e6)
    src_lang: str | None = setting(None, "Language code of its source (default: data.src_lang).")
    tgt_lang: str | None = setting(None, "Language code of its target (default: data.tgt_lang).")

    @model_validator(mode="after")
    def _one_form(self) -> Corpus:
        given = [value is not None for value in (self.src, self.tgt, self.path)]
        if given not in ([True, True, False], [False, False, True]):
            raise ValueError("a corpus is either src and tgt, or path")
        return self


class Monolingual(Section):
    """Text of the target language, which a translator of the other direction translates (back-translation)."""

    tgt: Path = setting(Path(), "Text file of the target language, one sentence per line.")
    model: Path = setting(Path(), "Run folder of a translator from the target language to the source language.")
    weight: float = setting(1.0, "Passes over its pairs per epoch.", gt=0, le=1e6)
    beam: int = setting(5, "Number of beams of the translator.", ge=1, le=MAX_BEAM)
    sample: bool = setting(False, "Draw the sources at random instead (Edunov et al. 2018).")

    @model_validator(mode="after")
    def _complete(self) -> Monolingual:
        if missing := {"tgt", "model"} - self.model_fields_set:
            raise ValueError(f"monolingual text needs tgt and model; {' and '.join(sorted(missing))} is missing")
        return self


class DataSettings(Section):
    """The text of a run, and the rules of its cleaning."""

    root: Path | None = setting(None, "Folder that relative paths start from (default: the recipe's).", _CHANGEABLE)
    src_lang: str = setting(
        "src", "Language code of the source; selects the side of a TMX file (default: from its header).", _LANGUAGE
    )
    tgt_lang: str = setting("tgt", "Language code of the target.", _LANGUAGE)
    languages: Literal["none", "tag", "tags"] = setting(
        "none", "Tokens before sources: tag, of the target language (Johnson et al. 2017); tags, of both.", _LANGUAGE
    )
    both_directions: bool = setting(False, "Also train, validate and test from target to source.", _CLEANING)
    temperature: float = setting(
        1.0, "Balance corpora: shares of an epoch grow with size^(1/temperature).", _OF_PAIRS, ge=1, le=100
    )
    train: tuple[Corpus, ...] = setting((), "Training corpora.")
    monolingual: tuple[Monolingual, ...] = setting(
        (), "Text of the target language to translate back: { tgt, model }; `valid` must be given.", _OF_PAIRS
    )
    valid: tuple[Corpus, ...] = setting((), "Validation corpora (default: a held-out part of train).")
    test: tuple[Corpus, ...] = setting((), "Test corpora: evaluated, and checked for overlap with train.")
    max_length: Tokens = setting(
        256, "Drop pairs with more tokens on a side; a classifier cuts longer texts (at least 8).", _LONGEST
    )
    max_ratio: float = setting(9.0, "Drop pairs above this length ratio (sides over 10 tokens).", _CLEANING, gt=1)
    deduplicate: bool = setting(False, "Keep only the first of identical training pairs.", _CLEANING)
    drop_copies: bool = setting(False, "Drop pairs whose source and target are identical.", _CLEANING)
    case_augmentation: Share = setting(
        0.0, "Fraction of pairs with a copy in capitals, in title case or without the last full stop.", _CLEANING
    )
    demo: int = setting(0, "Pairs of the built-in corpus to train on, instead of files.", _CLEANING, ge=0, le=1 << 31)
    on_error: Literal["stop", "skip"] = setting(
        "stop", "Training pairs that cannot be read: stop at the first one, or skip and count them.", _OF_PAIRS
    )
    max_record: int = setting(
        1 << 20, "Lines, TMX segments and table cells of this many bytes or more are not read.", ge=1, le=1 << 30
    )
    workers: int = setting(0, "Processes that clean and encode pairs; 0: one per core.", _WORKERS, ge=0, le=4096)
    documents: Literal["file", "blank_line", "line"] = setting(
        "file", "Separator of documents in plain text.", Traits(tasks=_TEXT, stored=True, inherited=("masked",))
    )
    context: Tokens | None = setting(
        None, "Tokens of context of text models; 8 or more for masked ones (default: from the data).", _CONTEXT, ge=2
    )
    masked: float = setting(0.15, "Fraction of tokens to mask (BERT).", _OF_MASKED, gt=0, lt=1)
    whole_words: bool = setting(False, "Mask all subwords of a word together.", _OF_MASKED)
    labels: tuple[str, ...] | None = setting(
        None, "Labels in order (default: those of the training data).", Traits(tasks=_LABELS, stored=True)
    )
    separate_documents: bool = setting(
        False, "Restrict attention to the document that a token belongs to.", Traits(tasks=("causal",))
    )

    @model_validator(mode="after")
    def _without_synthetic_validation(self) -> DataSettings:
        if self.monolingual and not self.valid:
            raise ValueError("monolingual text needs valid: no translation by a model is held out to validate on")
        return self

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return (*self.train, *self.valid, *self.test)

    @property
    def named_languages(self) -> tuple[str | None, str | None]:
        """The languages of source and target; None for a side whose language is not set."""
        return (
            self.src_lang if self.is_changed("src_lang") else None,
            self.tgt_lang if self.is_changed("tgt_lang") else None,
        )

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The direction of each training corpus, then the directions of reversed corpora."""
        given = [self.direction_of(corpus) for corpus in self.train] or [(self.src_lang, self.tgt_lang)]
        return (*given, *((tgt, src) for src, tgt in given if self.both_directions))

    def direction_of(self, corpus: Corpus) -> Direction:
        return corpus.src_lang or self.src_lang, corpus.tgt_lang or self.tgt_lang

    def below(self, root: Path) -> DataSettings:
        """Return the settings with absolute paths of local files; relative paths start from `root`."""

        def changed(corpus: Section) -> Section:
            paths = {key: path for key, path in corpus if key != "model" and isinstance(path, Path)}
            absolute = {key: Path(os.path.realpath(root / path)) for key, path in paths.items() if not is_remote(path)}
            return corpus.model_copy(update=absolute)

        return self.model_copy(
            update={
                name: tuple(map(changed, getattr(self, name))) for name in ("train", "monolingual", "valid", "test")
            }
        )


class TokenizerSettings(Section):
    """The SentencePiece tokenizer, trained by the same command and stored in the run folder."""

    kind: Literal["unigram", "bpe", "char", "marian", "hub"] = setting(
        "unigram", "SentencePiece model type; marian and hub are imported, not trained."
    )
    vocab_size: int | None = setting(None, "Vocabulary size (default: from the data).", ge=8, le=MAX_VOCAB)
    joint: bool = setting(True, "One vocabulary for source and target, as three-way ties need.", _OF_PAIRS)
    extend: int = setting(0, "Most tokens to add to the vocabulary when fine-tuning.", _OWN, ge=0, le=MAX_VOCAB)
    sampling: Share = setting(
        0.0, "Subword regularization: fraction of sentences or merges.", Traits(tasks=_PAIRS, own=True)
    )
    character_coverage: float = setting(1.0, "Fraction of characters that tokens cover.", ge=0.98, le=1)
    mask: bool = setting(False, "Include a <mask> token, as masked models need.", Traits(tasks=("masked", *_LABELS)))
    exact: bool = setting(
        False, "Make decoding reproduce the text: line ends, spaces, rare characters.", Traits(tasks=_TEXT + _LABELS)
    )
    normalization: Normalization = setting(
        "nmt_nfkc", "Unicode normalization of the source or only text; _cf folds case; identity keeps runs of spaces."
    )
    tgt_normalization: Normalization = setting(
        "nfc", "Unicode normalization of the target; by default the model writes what people wrote.", _OF_PAIRS
    )
    placeholders: Literal[0, 8] | None = setting(
        None, "Pieces for parts that must stay, such as unknown names (default: 8 for translators of text).", _OF_PAIRS
    )
    start: Path | None = setting(None, "Run folder whose tokenizer to use, instead of training one.", _OWN)


class LoraSettings(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021): fine-tuning trains two small matrices for each large matrix."""

    rank: int = setting(16, "Rows of the small matrices.", ge=1, le=1024)
    alpha: float | None = setting(None, "The adapters count alpha / rank times (default: twice).", gt=0, le=1e6)
    on: Literal["attention", "all"] = setting("attention", "Layers with adapters: attention, or all of the blocks.")
    weights: Literal["float32", "bfloat16"] = setting("float32", "Type of the frozen matrices; bfloat16 takes half.")
    merge: bool = setting(True, "At the end, add the adapters to the weights; false: keep them for the initial run.")

    @property
    def scale(self) -> float:
        """The factor by which the adapters' products are multiplied."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


_begin = setting(0.0, "Fraction of the training after which it begins.")


class _FromSettings(create_model("_FromSettings", __base__=Section, **{"from": (Below1, _begin)})):  # type: ignore[misc]
    """Base of sections with a setting called `from`, which is a keyword of Python; `begin` returns its value."""

    @property
    def begin(self) -> float:
        return float(getattr(self, "from"))


class SimCutSettings(_FromSettings):
    """Consistency of predictions from the whole text and from text with cut pieces (Gao et al. 2022)."""

    kind: Literal["simcut"] = "simcut"
    weight: float = setting(3.0, "Weight of the divergence.", gt=0, le=1e3)
    cut: float = setting(0.05, "Fraction of source and target pieces whose embeddings are zero.", gt=0, lt=1)


class RDropSettings(_FromSettings):
    """Consistency of predictions under different dropout (Liang et al. 2021)."""

    kind: Literal["rdrop"] = "rdrop"
    weight: float = setting(5.0, "Weight of the divergence.", gt=0, le=1e3)


AnyConsistency = Annotated[SimCutSettings | RDropSettings, Field(discriminator="kind")]


class NewLanguage(Section):
    """A language to add to a model that has a token for each of its languages."""

    code: str = setting("", "Code of the language, in the notation of the model, such as nds_Latn.")
    like: str = setting("", "Code of a related language of the model, whose token's vector the new token starts with.")

    @model_validator(mode="after")
    def _complete(self) -> NewLanguage:
        if not re.fullmatch(r"[\w.-]{1,32}", self.code) or not self.like:
            raise ValueError("give code, of letters, digits, _ and -, and like")
        return self


class TrainingSettings(Section):
    """Settings of the training."""

    seed: int = setting(1, "Seed of all random numbers.", _SHARED, ge=0, le=MAX_SEED)
    batch_tokens: int | None = setting(
        None, "Tokens per update, padding included, on the longer side.", _LIMIT, ge=1, le=MAX_BATCH
    )
    micro_batch_tokens: int | None = setting(None, "Tokens per forward pass.", _RECORDED, ge=1, le=MAX_BATCH)
    optimizer: str | None = setting(
        None, "adam, adamw or muon (default: by device and width; adamw for fine-tuning and parallel = shard)."
    )
    lr: float | None = setting(
        None, "Peak learning rate (default: by task and width; lower for fine-tuning).", _RECORDED, gt=0
    )
    matrix_lr: float | None = setting(
        None, "Peak learning rate of matrices under muon (default: twice the default of lr).", _RECORDED, gt=0
    )
    betas: tuple[Below1, Below1] = setting((0.9, 0.98), "Adam's decay rates (paper 5.3).")
    weight_decay: float = setting(0.0, "Decoupled weight decay (adamw, muon).", _RECORDED, ge=0)
    schedule: str | None = setting(None, "After warmup: inverse_sqrt (paper 5.3), linear, cosine, constant.", _RECORDED)
    warmup_updates: int | None = setting(
        None, "Updates of linear warmup (default: from the length of the training).", ge=0, le=MAX_STEPS
    )
    guided_alignment: Path | None = setting(
        None, "Pharaoh file of word alignments of the training text, which an attention head learns.", _OF_PAIRS
    )
    guided_weight: float = setting(0.05, "Weight of the loss of guided alignment.", _OF_PAIRS, gt=0, le=1e3)
    label_smoothing: Below1 = setting(0.1, "Label smoothing (paper 5.4).")
    word_dropout: Below1 = setting(
        0.0, "Fraction of source and target pieces whose embeddings become zero in training.", _OF_PAIRS
    )
    consistency: AnyConsistency | None = setting(
        None, 'Loss for equal predictions from two passes: { kind = "simcut" } or { kind = "rdrop" }.', _OF_PAIRS
    )
    clip_norm: float = setting(1.0, "Maximum gradient norm; 0: no clipping.", _RECORDED, ge=0)
    max_updates: Steps | None = setting(None, "Stop after this many updates (default: no limit).", _LIMIT)
    max_epochs: float | None = setting(
        None, "Passes over the data (default without a limit: by their amount; 3 for fine-tuning).", _LIMIT, gt=0
    )
    max_minutes: float | None = setting(
        None,
        "Time limit in minutes (default, if no limit is set: from the amount of data). After a fifth "
        "of it, it becomes a number of updates, which the schedule and the end follow; the clock is a safety net.",
        _LIMIT,
        gt=0,
    )
    precision: TrainingPrecision = setting(
        "auto", "Precision of matrix products; auto: bfloat16 where hardware has it.", _SHARED
    )
    device: str = setting("auto", "auto, cpu or cuda.", _SHARED)
    kernels: Literal["auto", "torch"] = setting(
        "auto", "torch: PyTorch only; auto: our kernels too, on CPUs with AVX2 and GPUs with bfloat16 and Triton."
    )
    parallel: Literal["replicate", "shard"] = setting(
        "replicate", "Several processes: replicate the model, or shard weights and optimizer state (FSDP)."
    )
    timeout: float = setting(
        10.0, "Minutes to wait for a process that does not answer, before all stop.", _CHANGEABLE, gt=0, le=1e6
    )
    average: Average = setting(
        "ema", "Final weights: ema (moving average), last or best (mean of the last or best n validations) or none."
    )
    average_n: int = setting(10, "Number of validations whose weights `last` and `best` average.", ge=1, le=1 << 16)
    ema_decay: float = setting(0.999, "Decay per update of the moving average, warmed up.", gt=0, lt=1)
    valid_updates: Steps | None = setting(None, "Updates between validations (default: about an epoch).", _LIMIT)
    valid_bleu_sentences: Count = setting(
        200,
        "Sentences to translate at each validation; 0: loss only.",
        Traits(tasks=_PAIRS, shared=True, changeable="recorded"),
    )
    patience: Count = setting(0, "Stop after this many validations without progress; 0: off.", _RECORDED)
    stop_by: Literal["loss", "bleu", "accuracy"] = setting(
        "bleu", "Score for early stopping and `best`; the loss where the run has no such score.", _RECORDED
    )
    start: Path | None = setting(None, "Run folder to fine-tune from.")
    lora: LoraSettings | None = setting(
        None, "Fine-tune by low-rank adapters on frozen weights, such as { rank = 16 }."
    )
    new_language: NewLanguage | None = setting(
        None, "Token of a language to add in fine-tuning: { code = 'nds_Latn', like = 'deu_Latn' }.", _OF_PAIRS
    )
    recompute: bool = setting(
        False, "Compute activations again in the backward pass: less memory, about a third more time."
    )
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = setting(
        (), "Experiment trackers that get what metrics.jsonl contains: tensorboard, wandb, mlflow.", _CHANGEABLE
    )
    keep_checkpoints: Count = setting(
        2, "Number of checkpoints to keep; 0: none once the training has finished.", _CHANGEABLE
    )
    save_updates: Steps | None = setting(
        None, "Updates between additional checkpoints (always: at validations and every ten minutes).", _CHANGEABLE
    )


class EvaluationSettings(Section):
    """Settings of the scoring of validation and test translations."""

    tokenize: str | None = setting(
        None,
        "Tokenizer of BLEU: 13a, none (for tokenized text), intl, char, zh, ja-mecab, ko-mecab, spm, flores101, "
        "flores200 or spBLEU-1K (default: by data.tgt_lang).",
        _OF_PAIRS,
    )
    lowercase: bool = setting(False, "Ignore case in BLEU and chrF.", _OF_PAIRS)


class Settings(Section):
    """All settings of a run."""

    name: str = setting("", "Name of the run in its report.", _CHANGEABLE)
    task: str = setting("translation", "Task: translation, causal, masked or classification.")
    extensions: tuple[Path, ...] = setting(
        (), "Python files with positional schemes or layers of your own; they run with --allow-code only.", _CHANGEABLE
    )
    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: AnyModelSettings = TransformerSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, values: Any) -> Any:
        """Set `model.kind`, if it is unset, to the architecture of the preset or to the default of the task."""
        model = values.get("model", {}) if isinstance(values, Mapping) else None
        if not isinstance(model, Mapping) or "kind" in model:
            return values
        preset = model.get("preset")
        kind = default_kind(str(values.get("task", "translation")), preset if isinstance(preset, str) else None)
        return {**values, "model": {"kind": kind, **model}}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, origin: str = "settings") -> Settings:
        """Validate a nested mapping; raise `SettingsError` with a wrong key or value and the allowed keys or values.

        `origin`: where the mapping comes from, for the message.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SettingsError(f"{origin}: {explain(error, cls)}", name_in(error)) from None

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = ()) -> Settings:
        """Read a recipe with overrides. Data paths are relative to `data.root`, or to the folder of the recipe."""
        values = read_recipe(path)
        apply_overrides(values, overrides)
        return cls.from_mapping(values, origin=str(path)).resolve_paths(path.parent)

    def resolve_paths(self, folder: Path) -> Settings:
        """Return the settings with absolute paths; data paths start at `data.root`, other paths at `folder`."""
        root = folder / (self.data.root or "")
        data = self.data.below(root)
        texts = (t.model_copy(update={"model": Path(os.path.realpath(folder / t.model))}) for t in data.monolingual)
        update: dict[str, Any] = {"data": data.model_copy(update={"monolingual": tuple(texts)})}
        if self.extensions:
            update["extensions"] = tuple(Path(os.path.realpath(folder / path)) for path in self.extensions)
        for name in ("tokenizer", "training"):
            section = getattr(self, name)
            if section.start is not None:
                start = Path(os.path.realpath(folder / section.start))
                update[name] = section.model_copy(update={"start": start})
        if self.training.guided_alignment is not None:
            path = Path(os.path.realpath(root / self.training.guided_alignment))
            update["training"] = update.get("training", self.training).model_copy(update={"guided_alignment": path})
        return self.model_copy(update=update)

    def traits(self) -> Iterator[tuple[str, Traits]]:
        """Yield the dotted name and the traits of each setting."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from ((f"{name}.{key}", traits_of(inner)) for key, inner in type(value).model_fields.items())
            else:
                yield name, traits_of(field)

    def with_values(self, section: str, **values: Any) -> Settings:
        """Return the settings with some values of one section replaced and validated; unset settings stay unset."""
        merged = self.model_dump(exclude_unset=True)
        merged[section] = merged.get(section, {}) | values
        return Settings.from_mapping(merged)
