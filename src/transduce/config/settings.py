"""Settings: frozen, checked, each default written once and explained in one sentence.

TOML in (a recipe), JSON out (`config.json` of the run folder). An unknown key is refused with the nearest known one.
`None` stands for "choose from the data and the machine"; `transduce.tasks.defaults` fills it in and says why.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from transduce.config.recipe import apply_override, read_recipe
from transduce.errors import SettingsError, nearest

Tie = Literal["three_way", "two_way", "none"]
Average = Literal["none", "last", "best", "ema"]
Decay = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal["auto", "float32", "bfloat16"]


MOST_BEAM, MOST_PENALTY, MOST_TOKENS, MOST_BATCH, MOST_SEED = 512, 10.0, 1_000_000, 1 << 31, (1 << 63) - 1
"""Bounds: beyond them nothing is found but the end of the memory, or of a number's range."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Corpus(Section):
    """One source of text: `src` and `tgt` text files, or one `path` that holds both sides, or plain text."""

    src: Path | None = Field(None, description="Text file of source sentences, one a line (.gz, .xz, .zst too).")
    tgt: Path | None = Field(None, description="Text file of target sentences, line for line with `src`.")
    path: Path | None = Field(
        None, description="One file: pairs as .tsv, .jsonl or .tmx, or text (.gz, .xz, .zst too)."
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Passes over it in an epoch: 2 twice, 0.5 half of it.")

    @model_validator(mode="after")
    def _one_form(self) -> Corpus:
        given = [value is not None for value in (self.src, self.tgt, self.path)]
        if given not in ([True, True, False], [False, False, True]):
            raise ValueError("a corpus is either src and tgt, or path")
        return self


class DataSettings(Section):
    """Which text, and how it is cleaned."""

    root: Path | None = Field(None, description="Folder that relative paths start from; default: the recipe's own.")
    src_lang: str = Field("src", description="Language code of the source; picks the side of a TMX file.")
    tgt_lang: str = Field("tgt", description="Language code of the target.")
    train: tuple[Corpus, ...] = Field((), description="Training corpora.")
    valid: tuple[Corpus, ...] = Field((), description="Held-out pairs to choose weights by; empty: split from train.")
    test: tuple[Corpus, ...] = Field((), description="Test pairs: only evaluated, and looked for in train.")
    demo: int = Field(0, ge=0, le=1 << 31, description="Pairs of the built-in corpus to train on, instead of files.")
    max_length: int = Field(
        256, ge=1, le=MOST_TOKENS, description="Longest sentence in tokens; pairs with longer ones go."
    )
    max_ratio: float = Field(9.0, gt=1, description="Largest ratio of the two lengths in tokens, above 10 tokens.")
    deduplicate: bool = Field(False, description="Keep only the first of identical pairs.")
    drop_copies: bool = Field(False, description="Drop pairs whose two sides are the same.")
    documents: Literal["file", "blank_line", "line"] = Field("file", description="What ends a document of plain text.")
    context: int | None = Field(None, ge=2, le=MOST_TOKENS, description="Tokens of text that the model sees at once.")
    masked: float = Field(0.15, gt=0, lt=1, description="Share of the tokens that a masked model must tell (BERT).")
    whole_words: bool = Field(False, description="Hide all pieces of a word together.")
    labels: tuple[str, ...] | None = Field(None, description="Labels in order; default: those of the training data.")
    separate_documents: bool = Field(False, description="Attention stays inside a document of plain text.")


class TokenizerSettings(Section):
    """SentencePiece, trained in the same command and stored in the run folder."""

    kind: Literal["unigram", "bpe", "char", "marian", "hub"] = Field(
        "unigram", description="SentencePiece model type; marian and hub: imported, not trained."
    )
    vocab_size: int | None = Field(
        None, ge=8, le=1 << 24, description="Pieces, with special ones; default: from the data."
    )
    joint: bool = Field(True, description="One vocabulary for both sides (needed to tie all embeddings) or one each.")
    extend: int = Field(
        0, ge=0, le=1 << 24, description="Pieces at most that the vocabulary of the run to begin with gets more."
    )
    sampling: float = Field(0.0, ge=0, le=1, description="Subword regularisation: share of sentences or merges.")
    character_coverage: float = Field(1.0, ge=0.98, le=1, description="Characters covered; below 1 for large scripts.")
    mask: bool = Field(False, description="A piece <mask>, which models that fill gaps need.")
    exact: bool = Field(False, description="Text comes back as it was: line ends, spaces, bytes of rare characters.")
    normalization: str = Field("nmt_nfkc", description="nmt_nfkc, nfkc, nmt_nfkc_cf (folds case) or identity.")


class ModelSettings(Section):
    """The architecture; the defaults are the paper's choices, the sizes those of `tiny`."""

    preset: str | None = Field(None, description="Sizes under a name, such as tiny: PRESETS; keys beside it win.")
    kind: str = Field("transformer", description="Name in the MODELS table.")
    d_model: int = Field(128, ge=1, le=1 << 16, description="Width of the residual stream (paper 3.1).")
    d_ff: int = Field(256, ge=1, le=1 << 20, description="Inner width of the position-wise feed-forward (paper 3.3).")
    n_heads: int = Field(4, ge=1, le=1 << 16, description="Attention heads (paper 3.2.2).")
    n_kv_heads: int | None = Field(None, ge=1, description="Heads of keys and values; default: n_heads.")
    n_encoder_layers: int = Field(4, ge=0, le=1024, description="Blocks of the encoder.")
    n_decoder_layers: int = Field(4, ge=1, le=1024, description="Blocks of the decoder.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of embeddings and sub-layers (paper 5.4).")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of attention weights.")
    activation_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout inside the feed-forward.")
    residual: str = Field("post", description="Norm after the residual (post, paper) or before the sub-layer (pre).")
    norm: str = Field("layer", description="layer or rms: NORMS.")
    norm_eps: float | None = Field(None, gt=0, description="Added to the variance; default: 1e-5 (layer), 1e-6 (rms).")
    embedding_norm: bool = Field(False, description="A norm on embeddings and positions together (BART, BERT).")
    scale_embeddings: bool = Field(True, description="Embeddings times sqrt(d_model) (paper 3.4).")
    positions: str = Field("sinusoidal", description="A name in POSITIONS: sinusoidal, learned, rotary, none, ...")
    feed_forward: str = Field("plain", description="plain, gated or conv: FEED_FORWARDS.")
    activation: str = Field("relu", description="relu, gelu, gelu_tanh or silu: ACTIVATIONS.")
    kernel_size: int = Field(1, ge=1, le=1024, description="Kernel of the conv feed-forward; 1 equals the plain one.")
    projection: str = Field("full", description="full, or shared: one d_head x d_head weight for all heads.")
    tie: Tie = Field("three_way", description="Embeddings that are one: source, target and output; the last two; none.")
    bias: bool = Field(True, description="Biases in linear layers and norms.")
    output_bias: bool | Literal["fixed"] = Field(
        False, description="A bias on the logits, one number a piece of the target vocabulary; fixed: never trained."
    )
    one_end: bool = Field(False, description="The beginning of a text is read as its end is: one piece (GPT-2).")
    n_segments: int = Field(
        0, ge=0, le=1024, description="Learned vectors of the segments A, B, ... of an encoder alone; 0: none."
    )
    next_sentence: bool = Field(False, description="A head that tells whether segment B followed A in the text (BERT).")
    pooling: str = Field(
        "first", description="What a classifier sees of a text: first ([CLS], BERT), mean or max: POOLINGS."
    )
    n_labels: int | None = Field(
        None, ge=2, le=1 << 20, description="Labels that a classifier tells apart; default: those of the data."
    )
    max_positions: int = Field(
        1024, ge=1, le=MOST_TOKENS, description="Longest sequence that the learned positions hold."
    )


class TrainingSettings(Section):
    """How the weights are found."""

    seed: int = Field(1, ge=0, le=MOST_SEED, description="Seed of everything random.")
    batch_tokens: int | None = Field(
        None, ge=1, le=MOST_BATCH, description="Padded tokens of the longer side an update."
    )
    micro_batch_tokens: int | None = Field(None, ge=1, le=MOST_BATCH, description="Those that fit in memory at once.")
    optimizer: str | None = Field(None, description="adam, adamw or muon; default: what measured best.")
    lr: float | None = Field(None, gt=0, description="Peak learning rate; default: by optimizer and width.")
    matrix_lr: float | None = Field(None, gt=0, description="Peak learning rate of matrices under muon.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), description="Adam's decay rates (paper 5.3).")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay (adamw, muon).")
    schedule: str | None = Field(None, description="After warm-up: inverse_sqrt (paper 5.3), linear, cosine, constant.")
    warmup_updates: int | None = Field(
        None, ge=0, le=1 << 40, description="Linear warm-up; default: from the length of training."
    )
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Uniform share of the targets (paper 5.4).")
    clip_norm: float = Field(1.0, ge=0, description="Largest norm of the gradient; 0: no clipping.")
    max_updates: int | None = Field(None, ge=1, le=1 << 40, description="Updates at most; default: from the data.")
    max_epochs: float | None = Field(None, gt=0, description="Passes over the data at most.")
    max_minutes: float | None = Field(None, gt=0, description="Minutes at most; the schedule ends with them.")
    precision: Precision = Field("auto", description="Arithmetic of matrix products; auto: bfloat16 where faster.")
    device: str = Field("auto", description="auto, cpu or cuda.")
    compile: bool = Field(False, description="torch.compile the model; pays on a GPU.")
    average: Average = Field("ema", description="Weights kept: the last, mean of last or best n, moving average (ema).")
    average_n: int = Field(10, ge=1, le=1 << 16, description="Checkpoints in the mean of last or best.")
    ema_decay: float = Field(0.999, gt=0, lt=1, description="Moving average's decay per update, warmed up.")
    valid_updates: int | None = Field(
        None, ge=1, le=1 << 40, description="Updates between validations; default: about an epoch."
    )
    valid_bleu_sentences: int = Field(
        200, ge=0, le=1 << 40, description="Sentences translated at each validation; 0: loss only."
    )
    patience: int = Field(
        0, ge=0, le=1 << 40, description="Validations without a better score before stopping; 0: never."
    )
    stop_by: Literal["loss", "bleu", "accuracy"] = Field(
        "bleu", description="What early stopping and `best` go by; the loss where the run has no such score."
    )
    start: Path | None = Field(
        None, description="Run folder whose vocabulary, sizes and weights the model begins with."
    )
    keep_checkpoints: int = Field(2, ge=1, le=1 << 40, description="Training states kept.")
    save_updates: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="Updates between training states; default: with validations, and every ten minutes.",
    )
    on_bad_loss: Literal["stop", "rollback"] = Field(
        "stop", description="After a loss that is not finite or explodes: stop, or go back and on past its batches."
    )
    max_rollbacks: int = Field(3, ge=1, le=1 << 40, description="Times that a run may go back before it stops.")
    explosion: float = Field(
        5.0, ge=0, description="Deviations that the loss must rise by, among other signs, to explode; 0: never."
    )


class DecodingSettings(Section):
    """The search that the run folder's translator uses unless told otherwise."""

    beam: int = Field(5, ge=1, le=MOST_BEAM, description="Hypotheses kept a sentence; 1 is greedy.")
    length_penalty: float = Field(
        1.0, ge=0, le=MOST_PENALTY, description="Exponent of the length that divides a score."
    )
    max_length: int = Field(256, ge=1, le=MOST_TOKENS, description="Longest output in tokens.")
    batch_tokens: int = Field(4096, ge=1, le=MOST_BATCH, description="Padded source tokens translated at once.")


class EvaluationSettings(Section):
    """How validation and test translations are scored."""

    tokenize: str = Field("13a", description="BLEU's tokenizer: 13a, or none for text that is tokenized already.")
    lowercase: bool = Field(False, description="Fold case before BLEU and chrF.")


class Settings(Section):
    """All settings of a run."""

    name: str = Field("", description="What the report calls the run.")
    task: str = Field(
        "translation", description="What is trained for: translation, causal, masked, classification: TASKS."
    )
    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, origin: str = "settings") -> Settings:
        """Check a nested mapping; a `SettingsError` names the key, what is allowed, and the nearest known one."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SettingsError(f"{origin}: {_explain(error)}") from None

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = ()) -> Settings:
        """Read a recipe with `--set` overrides; relative data paths start from `data.root`, or the recipe's folder."""
        values = read_recipe(path)
        for override in overrides:
            apply_override(values, override)
        return cls.from_mapping(values, origin=str(path)).resolve_paths(path.parent)

    def resolve_paths(self, folder: Path) -> Settings:
        """The same settings with relative data paths made absolute, from `data.root`, itself relative to `folder`."""
        start = folder / (self.data.root or "")

        def absolute(corpus: Corpus) -> Corpus:
            given = {key: getattr(corpus, key) for key in ("src", "tgt", "path")}
            paths = {key: Path(os.path.realpath(start / path)) for key, path in given.items() if path is not None}
            return corpus.model_copy(update=paths)

        sides = {key: tuple(map(absolute, getattr(self.data, key))) for key in ("train", "valid", "test")}
        update: dict[str, Any] = {"data": self.data.model_copy(update=sides)}
        if (begin := self.training.start) is not None:
            update["training"] = self.training.model_copy(update={"start": Path(os.path.realpath(folder / begin))})
        return self.model_copy(update=update)

    def with_values(self, section: str, **values: Any) -> Settings:
        """The same settings with checked values of one section replaced; what was not given stays "not given"."""
        merged = self.model_dump(exclude_unset=True)
        merged[section] = merged.get(section, {}) | values
        return Settings.from_mapping(merged)


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys that the section at `location` knows."""
    section: Any = Settings
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), section)
    return list(section.model_fields)


def _suggestion(parents: Sequence[str | int], key: str, value: Any) -> str:
    """What may have been meant by an unknown key: its whole name where it stands in another section, or a near one."""
    known = _known_keys(parents)
    if isinstance(value, Mapping):  # meant as a section
        known = [name for name in known if _section_keys(name)] if not parents else known
    elif elsewhere := [f"{section}.{key}" for section in Settings.model_fields if key in _section_keys(section)]:
        return "; did you mean " + " or ".join(f"'{name}'" for name in elsewhere) + "?"
    return nearest(key, known) or "; known: " + ", ".join(known)


def _section_keys(section: str) -> list[str]:
    """The keys of a section; none, where the name is that of a single setting."""
    keys = _known_keys([section])
    return [] if keys == list(Settings.model_fields) else keys


def _explain(error: ValidationError) -> str:
    """The first problem of a validation, in one line."""
    first = error.errors()[0]
    name = ".".join(str(p) for p in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        return f"unknown key '{name}'{_suggestion(parents, str(key), first['input'])}"
    if first["type"] == "model_type":
        known = ", ".join(_known_keys(first["loc"]))
        return f"{name} = {first['input']!r}: a section, not a value; its keys: {known}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f" = {first['input']!r}"
    return f"{name}{given}: {message[:1].lower()}{message[1:]}"
