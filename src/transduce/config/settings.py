"""Settings of a run: frozen, validated, each default written once, each setting explained in one sentence.

TOML in (a recipe), JSON out (`config.json` of the run folder). An unknown key is refused with the nearest known one.
`None` means "choose from the data and the machine"; `transduce.tasks.resolve` fills it in and says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from transduce.config.architectures import TransformerSettings
from transduce.config.decoding import DecodingSettings
from transduce.config.kinds import AnyModelSettings, default_kind
from transduce.config.recipe import apply_overrides, read_recipe
from transduce.config.section import (
    MAX_BATCH,
    MAX_SEED,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_VOCAB,
    Section,
    explain,
)
from transduce.errors import SettingsError

Average = Literal["none", "last", "ema"]
Decay = Annotated[float, Field(ge=0, lt=1)]
TrainingPrecision = Literal["auto", "float32", "bfloat16"]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]


def is_remote(path: Path) -> bool:
    """Whether a path is an address such as `s3://bucket/a.tsv`, of which a path keeps `s3:/bucket/a.tsv`."""
    return re.match(r"[a-z][a-z0-9+.-]+:/", path.as_posix()) is not None


class Corpus(Section):
    """One source of text: files `src` and `tgt`, or one `path` with sentence pairs or plain text."""

    src: Path | None = Field(None, description="Text file of source sentences, one per line (.gz, .xz, .zst too).")
    tgt: Path | None = Field(None, description="Text file of target sentences, line by line parallel to `src`.")
    path: Path | None = Field(
        None, description="One file of pairs (.tsv, .jsonl, ...) or of text (.gz, .xz, .zst too)."
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Passes over the corpus per epoch: 2 for two, 0.5 for half.")

    @model_validator(mode="after")
    def _one_form(self) -> Corpus:
        given = [value is not None for value in (self.src, self.tgt, self.path)]
        if given not in ([True, True, False], [False, False, True]):
            raise ValueError("a corpus is either src and tgt, or path")
        return self


class DataSettings(Section):
    """Which text, and how it is cleaned."""

    root: Path | None = Field(None, description="Folder that relative paths start from (default: the recipe's).")
    src_lang: str = Field("src", description="Language code of the source; selects the side of a TMX file.")
    tgt_lang: str = Field("tgt", description="Language code of the target.")
    train: tuple[Corpus, ...] = Field((), description="Training corpora.")
    valid: tuple[Corpus, ...] = Field((), description="Validation corpora (default: a held-out part of train).")
    test: tuple[Corpus, ...] = Field((), description="Test corpora: evaluated, and checked for overlap with train.")
    demo: int = Field(0, ge=0, le=1 << 31, description="Pairs of the built-in corpus to train on, instead of files.")
    max_length: int = Field(
        256,
        ge=1,
        le=MAX_TOKENS,
        description="Drop pairs with more tokens than this on a side; a classifier cuts longer texts (at least 8).",
    )
    max_ratio: float = Field(9.0, gt=1, description="Drop pairs above this length ratio (sides over 10 tokens).")
    deduplicate: bool = Field(False, description="Keep only the first of identical training pairs.")
    drop_copies: bool = Field(False, description="Drop pairs whose source and target are identical.")
    workers: int = Field(0, ge=0, le=4096, description="Processes that clean and encode pairs; 0: one per core.")
    documents: Literal["file", "blank_line", "line"] = Field("file", description="What separates text documents.")
    context: int | None = Field(
        None,
        ge=2,
        le=MAX_TOKENS,
        description="Context length of text models in tokens; at least 8 for masked ones (default: from the data).",
    )
    masked: float = Field(0.15, gt=0, lt=1, description="Fraction of tokens to mask (BERT).")
    whole_words: bool = Field(False, description="Mask all subwords of a word together.")
    labels: tuple[str, ...] | None = Field(None, description="Labels in order (default: those of the training data).")
    separate_documents: bool = Field(False, description="Restrict attention to the document that a token belongs to.")

    def with_local_paths(self, change: Callable[[Path], Path]) -> DataSettings:
        """The same settings with the paths of local files changed."""

        def changed(corpus: Corpus) -> Corpus:
            paths = {key: path for key in ("src", "tgt", "path") if (path := getattr(corpus, key)) is not None}
            places = {key: change(path) for key, path in paths.items() if not is_remote(path)}
            return corpus.model_copy(update=places)

        return self.model_copy(
            update={name: tuple(map(changed, getattr(self, name))) for name in ("train", "valid", "test")}
        )


class TokenizerSettings(Section):
    """The SentencePiece tokenizer, trained by the same command and stored in the run folder."""

    kind: Literal["unigram", "bpe", "char", "marian", "hub"] = Field(
        "unigram", description="SentencePiece model type; marian and hub are imported, not trained."
    )
    vocab_size: int | None = Field(None, ge=8, le=MAX_VOCAB, description="Vocabulary size (default: from the data).")
    joint: bool = Field(True, description="One vocabulary for source and target, as three-way ties need.")
    extend: int = Field(0, ge=0, le=MAX_VOCAB, description="Most tokens to add to the vocabulary when fine-tuning.")
    sampling: float = Field(0.0, ge=0, le=1, description="Subword regularization: fraction of sentences or merges.")
    character_coverage: float = Field(1.0, ge=0.98, le=1, description="Fraction of characters that tokens cover.")
    mask: bool = Field(False, description="Include a <mask> token, as masked models need.")
    exact: bool = Field(False, description="Make decoding reproduce the text: line ends, spaces, rare characters.")
    normalization: Literal["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf", "identity"] = Field(
        "nmt_nfkc", description="Unicode normalization; those with _cf also fold case, identity changes nothing."
    )
    start: Path | None = Field(None, description="Run folder whose tokenizer to use, instead of training one.")


class TrainingSettings(Section):
    """Settings of the training."""

    seed: int = Field(1, ge=0, le=MAX_SEED, description="Seed of all random numbers.")
    batch_tokens: int | None = Field(
        None, ge=1, le=MAX_BATCH, description="Tokens per update, padding included, on the longer side."
    )
    micro_batch_tokens: int | None = Field(None, ge=1, le=MAX_BATCH, description="Tokens per forward pass.")
    optimizer: str | None = Field(
        None,
        description="adam, adamw or muon (default: by device and model width; adamw for fine-tuning and with "
        "parallel = shard).",
    )
    lr: float | None = Field(
        None, gt=0, description="Peak learning rate (default: by task and width; lower for fine-tuning)."
    )
    matrix_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of matrices under muon (default: twice the default of lr)."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), description="Adam's decay rates (paper 5.3).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay (adamw, muon).")
    schedule: str | None = Field(None, description="After warmup: inverse_sqrt (paper 5.3), linear, cosine, constant.")
    warmup_updates: int | None = Field(
        None, ge=0, le=MAX_STEPS, description="Updates of linear warmup (default: from the length of the training)."
    )
    guided_alignment: Path | None = Field(
        None,
        description="Pharaoh file of word alignments, parallel to the training text, that one attention head learns.",
    )
    guided_weight: float = Field(0.05, gt=0, le=1e3, description="Weight of the loss of guided alignment.")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Label smoothing (paper 5.4).")
    clip_norm: float = Field(1.0, ge=0, description="Maximum gradient norm; 0: no clipping.")
    max_updates: Steps | None = Field(None, description="Stop after this many updates (default: no limit).")
    max_epochs: float | None = Field(
        None,
        gt=0,
        description="Stop after this many passes over the data (default, if no limit is set: from the amount of data; "
        "3 for fine-tuning).",
    )
    max_minutes: float | None = Field(
        None,
        gt=0,
        description="Time limit in minutes (default, if no limit is set: from the amount of data). Once the speed is "
        "measured it becomes a number of updates, which the schedule and the end follow; the clock is a safety net.",
    )
    precision: TrainingPrecision = Field(
        "auto", description="Precision of matrix products; auto: bfloat16 where hardware has it."
    )
    device: str = Field("auto", description="auto, cpu or cuda.")
    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="What computes in training: torch (PyTorch only), or auto: our own kernels where there are any, on "
        "CPUs with AVX2 or AVX-512 and, with Triton, on GPUs that have bfloat16.",
    )
    parallel: Literal["replicate", "shard"] = Field(
        "replicate", description="Several processes: replicate the model, or shard weights and optimizer state (FSDP)."
    )
    timeout: float = Field(
        10.0, gt=0, le=1e6, description="Minutes to wait for a process that does not answer, before all stop."
    )
    average: Average = Field(
        "ema", description="Final weights: ema (moving average), last (mean of the last n validations) or none."
    )
    average_n: int = Field(10, ge=1, le=1 << 16, description="Number of validations whose weights `last` averages.")
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Decay per update of the moving average, warmed up.")
    valid_updates: Steps | None = Field(None, description="Updates between validations (default: about an epoch).")
    valid_bleu_sentences: int = Field(
        200, ge=0, le=MAX_STEPS, description="Sentences to translate at each validation; 0: loss only."
    )
    patience: int = Field(
        0, ge=0, le=MAX_STEPS, description="Stop after this many validations without progress; 0: off."
    )
    stop_by: Literal["loss", "bleu", "accuracy"] = Field(
        "bleu", description="Score for early stopping and `best`; the loss where the run has no such score."
    )
    start: Path | None = Field(None, description="Run folder to fine-tune from.")
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        (), description="Experiment trackers that get what metrics.jsonl contains: tensorboard, wandb, mlflow."
    )
    keep_checkpoints: int = Field(2, ge=1, le=MAX_STEPS, description="Number of checkpoints to keep.")
    save_updates: Steps | None = Field(
        None,
        description="Also save a checkpoint every so many updates (always: at each validation and every ten minutes).",
    )


class EvaluationSettings(Section):
    """Settings of the scoring of validation and test translations."""

    tokenize: str = Field(
        "13a",
        description="BLEU's tokenizer: 13a, none (for tokenized text), intl, char, zh, ja-mecab, ko-mecab, spm, "
        "flores101, flores200 or spBLEU-1K.",
    )
    lowercase: bool = Field(False, description="Ignore case in BLEU and chrF.")


class Settings(Section):
    """All settings of a run."""

    name: str = Field("", description="Name of the run in its report.")
    task: str = Field("translation", description="Task: translation, causal, masked or classification.")
    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: AnyModelSettings = TransformerSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, values: Any) -> Any:
        """Without `model.kind`, the architecture is the one that the preset or else the task asks for."""
        model = values.get("model", {}) if isinstance(values, Mapping) else None
        if not isinstance(model, Mapping) or "kind" in model:
            return values
        preset = model.get("preset")
        kind = default_kind(str(values.get("task", "translation")), preset if isinstance(preset, str) else None)
        return {**values, "model": {"kind": kind, **model}}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, origin: str = "settings") -> Settings:
        """Settings from a nested mapping; a `SettingsError` names the wrong key or value and what is allowed."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SettingsError(f"{origin}: {explain(error, cls)}") from None

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = ()) -> Settings:
        """Read a recipe with overrides. Data paths are relative to `data.root`, or to the folder of the recipe."""
        values = read_recipe(path)
        apply_overrides(values, overrides)
        return cls.from_mapping(values, origin=str(path)).resolve_paths(path.parent)

    def resolve_paths(self, folder: Path) -> Settings:
        """The same settings with absolute data paths, from `data.root`, which is relative to `folder`."""
        root = folder / (self.data.root or "")
        update: dict[str, Any] = {"data": self.data.with_local_paths(lambda path: Path(os.path.realpath(root / path)))}
        for name in ("tokenizer", "training"):
            section = getattr(self, name)
            if section.start is not None:
                start = Path(os.path.realpath(folder / section.start))
                update[name] = section.model_copy(update={"start": start})
        if self.training.guided_alignment is not None:
            path = Path(os.path.realpath(root / self.training.guided_alignment))
            update["training"] = update.get("training", self.training).model_copy(update={"guided_alignment": path})
        return self.model_copy(update=update)

    def with_values(self, section: str, **values: Any) -> Settings:
        """The same settings with validated values of one section replaced; unset settings stay unset."""
        merged = self.model_dump(exclude_unset=True)
        merged[section] = merged.get(section, {}) | values
        return Settings.from_mapping(merged)
