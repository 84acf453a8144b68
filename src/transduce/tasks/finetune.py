"""Fine-tuning: start a run from the weights of another run (`training.start`).

The new run inherits the vocabulary, the weights, the shape of the model and dependent settings. Contradicting settings
are refused. The weights are copied into the new run's folder, so that a resumed run does not need the other run.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config.architectures import kinds_for, preset_values, resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.section import Section, traits_of
from transduce.config.settings import LoraSettings, Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES, Uninitialized, build_model, count_parameters
from transduce.nn.adapters import add_adapters
from transduce.process import release_memory
from transduce.runs.folder import NEW, RunFolder
from transduce.runs.manifest import WEIGHTS, fingerprint
from transduce.runs.tensor_file import read_header
from transduce.runs.tensors import copy_stored, save_tensors
from transduce.text.extension import SAMPLE_LINES, Extended, Parts, add_language, extend, new_pieces
from transduce.text.hub import HubTokenizer
from transduce.text.special import MASK, MASK_PIECE, UNK, Vocabulary
from transduce.text.tokenizer import SentencePieceVocabulary, Tokenizers, check_directions, load_tokenizers
from transduce.text.training import sample_of

_HEADS = ("head.", "output_bias", "output_embedding.", "next_sentence.", "pooler.", "labels.")
"""Prefixes of the names of weights that only some models of a family have. They are random if they are missing."""
_ROWS = {
    "src_embedding.table.weight": "src",
    "tgt_embedding.table.weight": "tgt",
    "embedding.table.weight": "tgt",
    "output_embedding.weight": "tgt",
    "output_bias": "tgt",
}
"""Weights with one row per piece, and the side whose vocabulary has the pieces."""
_WEIGHT = ".weight"
_SHOWN = 3  # number of new pieces that are printed from each end of the list
_FEW_UNKNOWN = 0.01  # largest share of lines with unknown characters that causes no warning
_MEASURED = 2000  # lines per side that are tokenized with both vocabularies to compare them


@dataclass(frozen=True, slots=True)
class Start:
    """A run to fine-tune from, or whose tokenizer to use.

    `settings`: the user's settings for the new run, and inherited settings. `summary`: a line about inherited values.
    """

    run: RunFolder
    settings: Settings
    summary: str


def find_start(asked: Settings) -> Start | None:
    """Open the run that `training.start` or `tokenizer.start` names; None if neither is set.

    Raises:
        SettingsError: The run's model does not fit the task, or the settings contradict the run's.
        RunFolderError: The folder is not a run, or is damaged.
    """
    if asked.training.start is None:
        if asked.training.new_language is not None:
            raise SettingsError(
                "training.new_language: there is no vocabulary to add a language to; name the run to fine-tune from",
                "training.start",
            )
        if asked.tokenizer.extend:
            raise SettingsError(
                f"tokenizer.extend = {asked.tokenizer.extend}: there is no vocabulary to extend; set training.start",
                *("tokenizer.extend", "training.start"),
            )
        return _find_tokenizer(asked)
    if asked.tokenizer.start is not None:
        raise SettingsError(
            f"tokenizer.start = '{asked.tokenizer.start}': fine-tuning uses the vocabulary of training.start; leave it "
            "out",
            "training.start",
        )
    resolve_preset(asked.model)  # raises for an unknown preset
    run = RunFolder.open(asked.training.start)
    kinds = kinds_for(asked.task)
    if run.settings.model.kind in kinds and asked.model.kind == kinds[0]:
        asked = asked.with_values("model", kind=run.settings.model.kind)
    _check_start(asked, run)
    values = asked.model_dump(exclude_unset=True)
    for section in ("model", "tokenizer"):
        values[section] = _merged_section(section, asked, run.settings, origin="training.start")
    values["tokenizer"]["extend"] = asked.tokenizer.extend
    inherited = _inherited(asked, run.settings)
    for (section, key), value in inherited.items():
        values.setdefault(section, {})[key] = value
    if run.settings.extensions:
        values.setdefault("extensions", run.settings.extensions)
    start = Settings.from_mapping(values)
    if asked.task == "translation":
        if asked.data.is_changed("languages") and asked.data.languages != run.settings.data.languages:
            raise SettingsError(
                f"data.languages = '{asked.data.languages}': training.start has the vocabulary of a run with "
                f"'{run.settings.data.languages}'; leave it out",
                "training.start",
            )
        framing, language = load_tokenizers(run).src.framing, asked.training.new_language
        if language is not None:  # its token does not exist yet: it is added with the new pieces
            framing = framing.with_language(language.code, -1)
        check_directions(start.data, framing)
    model = run.settings.model
    parts = [
        f"starting from {run.path}: vocabulary ({_described_vocabulary(run)})",
        f"model ({model.kind}, d_model {model.d_model}, {' + '.join(map(str, model.depth))} layers)",
        *(f"{section}.{key} = {value}" for (section, key), value in inherited.items()),
    ]
    return Start(run, start, ", ".join(parts))


def _check_start(asked: Settings, run: RunFolder) -> None:
    """Raise `SettingsError` if a run's model is of another family, or its vocabulary cannot be extended as asked."""
    family, extend_by = ARCHITECTURES[asked.model.kind].family, asked.tokenizer.extend
    if ARCHITECTURES[run.settings.model.kind].family != family:
        fitting = [name for name, architecture in ARCHITECTURES.items() if architecture.family == family]
        raise SettingsError(
            f"training.start = '{run.path}': its model is of kind '{run.settings.model.kind}'; task '{asked.task}' "
            f"needs {' or '.join(fitting)}",
            "training.start",
        )
    if extend_by and not isinstance(load_tokenizers(run).src, SentencePieceVocabulary):
        raise SettingsError(
            f"tokenizer.extend = {extend_by}: {run.path} has a vocabulary that cannot be extended; leave it out",
            "tokenizer.extend",
        )


def _find_tokenizer(asked: Settings) -> Start | None:
    if asked.tokenizer.start is None:
        return None
    run = RunFolder.open(asked.tokenizer.start, model=False)
    if run.settings.task != asked.task:
        raise SettingsError(
            f"tokenizer.start = '{run.path}': a run of task '{run.settings.task}', not '{asked.task}'; name another run"
        )
    values = asked.model_dump(exclude_unset=True)
    values["tokenizer"] = _merged_section("tokenizer", asked, run.settings, origin="tokenizer.start") | {"extend": 0}
    summary = f"tokenizer of {run.path}: {_described_vocabulary(run)}"
    return Start(run, Settings.from_mapping(values), summary)


def _described_vocabulary(run: RunFolder) -> str:
    tgt = load_tokenizers(run).tgt
    if not tgt.reads_text:
        return f"none, for inputs of width {tgt.vocab_size:,}"
    return f"{tgt.vocab_size:,} pieces, {run.settings.tokenizer.kind}"


def extend_vocabulary(start: Start, lines: tuple[Iterable[str], Iterable[str]], log: Log) -> Extended:
    """Extend the vocabulary of the run to start from by `tokenizer.extend` pieces, learned from lines of both sides.

    Add the token of `training.new_language`, if it is set. Without extension, warn of unknown characters.
    """
    src, tgt = lines
    n, language = start.settings.tokenizer.extend, start.settings.training.new_language
    tokenizers = load_tokenizers(start.run).unframed()
    if start.settings.task == "masked" and tokenizers.tgt.vocab_size > MASK:
        hub = start.settings.tokenizer.kind == HubTokenizer.kind
        if not hub and tokenizers.tgt.pieces([MASK]) != [MASK_PIECE]:
            raise SettingsError(
                f"training.start = '{start.run.path}': its vocabulary has no {MASK_PIECE}, which task 'masked' needs; "
                "start from a masked language model",
                "training.start",
            )
    if not n and language is None:
        for side, vocabulary, text in (("source", tokenizers.src, src), ("target", tokenizers.tgt, tgt)):
            _warn_of_unknown(side, vocabulary, sample_of(text, _MEASURED, seed=0), log)
        return Extended(tokenizers, (), ())
    extended = Extended(tokenizers, (), ())
    if n:
        src, tgt = (sample_of(side, SAMPLE_LINES, seed=start.settings.training.seed) for side in lines)
        extended = extend(tokenizers, src, tgt, n=n)
        for line in _compare_vocabularies(tokenizers, extended.tokenizers.unframed(), src, tgt):
            log.say(line)
        if len(extended.tgt) < n and tokenizers.tgt.of_characters:
            log.say(f"  fewer than {n:,}: a character vocabulary is extended by missing characters only")
    if language is not None:
        extended = add_language(extended, language.code, like=language.like)
        log.say(f"language {language.code}: a new token, which starts as that of {language.like}")
    return replace(extended, tokenizers=extended.tokenizers.unframed())


def _warn_of_unknown(side: str, vocabulary: Vocabulary, lines: Sequence[str], log: Log) -> None:
    """Warn if more than 1 % of the lines have characters that the vocabulary lacks. `side`: "source" or "target"."""
    unknown = [vocabulary.unknown(line) for line in lines] if vocabulary.unreadable_ids else []
    n_lines = sum(map(bool, unknown))
    if n_lines > _FEW_UNKNOWN * len(lines):
        most = [part for part, _ in Counter(chain.from_iterable(unknown)).most_common(8)]
        is_fixed = not isinstance(vocabulary, SentencePieceVocabulary)
        advice = "" if is_fixed else "; --extend-vocabulary 2000 (tokenizer.extend) adds them"
        log.warn(
            f"{n_lines:,} of {len(lines):,} {side} lines have characters that the vocabulary lacks: {' '.join(most)}"
            f"{advice}"
        )


def save_start_weights(start: Start, extended: Extended, settings: Settings, folder: Path) -> None:
    """Save the weights of the run to start from, with rows for new pieces, into `folder`, the new run's `tokens`.

    With `training.lora` the new rows of tables are separate tensors, because only these rows are trained.
    """
    path, lora = folder / "start.safetensors", settings.training.lora
    same_labels = start.run.settings.data.labels == settings.data.labels
    folder.mkdir(exist_ok=True)
    if same_labels and not (extended.src or extended.tgt or start.run.has_adapters):
        shutil.copyfile(start.run.path / WEIGHTS, path)  # loading and saving would take several times the memory
        if fingerprint(path)["sha256"] != start.run.weights_digest():
            raise RunFolderError(f"{start.run.path / WEIGHTS} is damaged, or was changed while it was read; try again")
        return
    if lora is not None and not lora.merge:
        raise SettingsError(
            "training.lora.merge = false: the adapters would not fit the weights in training.start, which get new "
            "pieces or labels, or are adapters themselves; leave it out",
            "training.lora.merge",
        )
    tokenizers = extended.tokenizers
    sides = {"src": (extended.src, _ordinary(tokenizers.src)), "tgt": (extended.tgt, _ordinary(tokenizers.tgt))}
    kept = dict[str, Tensor]()
    for name, tensor in start.run.load_model().items():
        if name in _ROWS:
            whole = with_rows(tensor, *sides[_ROWS[name]])
            if lora is not None and name.endswith(_WEIGHT) and len(whole) > len(tensor):
                kept[name.removesuffix(_WEIGHT) + NEW], whole = whole[len(tensor) :], tensor
            kept[name] = whole
        elif same_labels or not name.startswith("labels."):
            kept[name] = tensor
    save_tensors(path, kept)
    kept.clear()
    release_memory()  # of all weights in float32; adapters may be trained in much less


def with_rows(tensor: Tensor, parts: Sequence[Parts], first: int) -> Tensor:
    """Append a row to a tensor [V, ...] for each new piece: the mean of the rows of its parts, which are old pieces.

    A piece without parts gets the mean of all rows of ordinary pieces, which start at `first`. Logits are linear in the
    rows, so no new piece is more likely than the most likely old piece.
    """
    if not parts:
        return tensor
    mean = tensor[first:].mean(0)
    return torch.cat([tensor, torch.stack([tensor[list(p)].mean(0) if p else mean for p in parts])])


def load_start_weights(model: nn.Module, folder: Path, log: Log, *, lora: LoraSettings | None = None) -> None:
    """Load the weights that `save_start_weights` saved in `folder`; print missing weights, which stay random.

    Only weights of output layers may be missing. With `lora`, loaded weights are frozen, and adapters are added.
    """
    path, own = folder / "start.safetensors", model.state_dict()
    saved, new_rows = _saved_shapes(path)
    missing = [name for name, tensor in own.items() if saved.get(name) != tensor.shape]
    if wrong := [name for name in missing if not name.startswith(_HEADS)]:
        raise SettingsError(
            f"training.start: the weights do not fit this model: {', '.join(wrong[:5])}", "training.start"
        )
    n_tensors, n_weights = len(own), count_parameters(model)
    if lora is not None:
        adapt(model, lora, new_rows=new_rows, trained=missing)
        own = model.state_dict()
    copy_stored(path, {name: tensor for name, tensor in own.items() if name not in missing})
    unused = [name for name in saved if name not in own]
    parts = [f"{n_tensors - len(missing)} of {n_tensors} tensors loaded from training.start"]
    parts += [f"{label}: {', '.join(names)}" for label, names in (("random", missing), ("unused", unused)) if names]
    log.say("; ".join(parts))
    if lora is not None:
        log.say(
            f"LoRA of rank {lora.rank} on {lora.on}: {count_parameters(model):,} parameters are trained, "
            f"{n_weights:,} are frozen"
        )


def build_frozen(settings: ModelSettings, *, folder: Path, n_src: int, n_tgt: int) -> nn.Module:
    """Build a model for `load_start_weights`; skip its random initialization if the file has all weights."""
    saved, _ = _saved_shapes(folder / "start.safetensors")
    with torch.device("meta"), Uninitialized():
        own = build_model(settings, n_src=n_src, n_tgt=n_tgt).state_dict()
    has_all = all(saved.get(name) == tensor.shape for name, tensor in own.items())
    with Uninitialized() if has_all else nullcontext():
        return build_model(settings, n_src=n_src, n_tgt=n_tgt)


def _saved_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the shapes of saved weights by name, and the number of new rows of tables, which the shapes include."""
    saved = read_header(path).shapes()
    new_rows = {name.removesuffix(NEW) + _WEIGHT: saved.pop(name)[0] for name in [*saved] if name.endswith(NEW)}
    for name, n in new_rows.items():
        saved[name] = (saved[name][0] + n, *saved[name][1:])
    return saved, new_rows


def adapt(
    model: nn.Module, lora: LoraSettings, *, new_rows: Mapping[str, int] | None = None, trained: Collection[str] = ()
) -> None:
    """Freeze the weights of a model and add adapters; see `add_adapters`."""
    add_adapters(
        model,
        rank=lora.rank,
        scale=lora.scale,
        on=lora.on,
        dtype=getattr(torch, lora.weights),
        new_rows=new_rows or {},
        trained=trained,
    )


def _merged_section(section: str, asked: Settings, other: Settings, *, origin: str) -> dict[str, Any]:
    """Return a section with the other run's values and, for settings that may differ, the given values.

    `origin`: the setting that names the other run. Raises `SettingsError` for a contradiction.
    """
    ours: Section = getattr(asked, section)
    theirs: Section = getattr(other, section)
    merged = {
        key: value
        for key, value in theirs.model_dump(exclude={"preset", "start"}).items()
        if key in type(ours).model_fields
    }
    given = {key: getattr(ours, key) for key in ours.model_fields_set}
    own = [key for key, field in type(ours).model_fields.items() if traits_of(field).own]
    preset = given.pop("preset", None)
    for key, value in preset_values(ours).items() if isinstance(ours, ModelSettings) else ():
        if key not in (*given, *own) and merged.get(key, value) != value:
            raise SettingsError(
                f"model.preset = '{preset}' has {key} = {value!r}: {origin} has {merged[key]!r}; leave it out",
                origin,
            )
    for key, value in given.items():
        if key in own:
            merged[key] = value
        elif value != merged.setdefault(key, value):
            problem = f"{section}.{key} = {value!r}: {origin} has {merged[key]!r}; leave it out"
            if key == "vocab_size" and origin == "training.start":
                raise SettingsError(f"{problem}; tokenizer.extend adds pieces", origin, "tokenizer.extend")
            raise SettingsError(problem, origin)
    if section == "tokenizer" and "sampling" not in given:
        merged["sampling"] = 0.0
    return merged


def _inherited(asked: Settings, other: Settings) -> dict[tuple[str, str], Any]:
    """Return the inherited settings by (section, key): unset in the new run, and not the default in the other run."""
    if asked.task != other.task:
        return {}
    inherited = {}
    for name, traits in asked.traits():
        section, _, key = name.rpartition(".")
        if asked.task in traits.inherited and key not in getattr(asked, section).model_fields_set:
            theirs = getattr(other, section)
            if theirs.is_changed(key):
                inherited[section, key] = getattr(theirs, key)
    return inherited


def _ordinary(vocabulary: Vocabulary) -> int:
    """Return the first id of a vocabulary after its special tokens."""
    return MASK + (vocabulary.pieces([MASK]) == [MASK_PIECE])


def _compare_vocabularies(old: Tokenizers, new: Tokenizers, src: Sequence[str], tgt: Sequence[str]) -> Iterator[str]:
    """Yield lines that describe the effect of an extension on each vocabulary, measured on sample lines."""
    sides = [("source vocabulary", old.src, new.src, src), ("target vocabulary", old.tgt, new.tgt, tgt)]
    if old.joint:
        sides = [("vocabulary", old.tgt, new.tgt, [*src[:_MEASURED], *tgt[:_MEASURED]])]
    for name, before, after, text in sides:
        pieces, sample = new_pieces(before, after), text[: 2 * _MEASURED]
        old_ids, new_ids = before.encode_batch(sample), after.encode_batch(sample)
        n = max(1, len(sample))
        n_unchanged = sum(old == new for old, new in zip(old_ids, new_ids, strict=True))
        n_unknown = [sum(ids.count(UNK) for ids in encoded) for encoded in (old_ids, new_ids)]
        shown = pieces if len(pieces) <= 2 * _SHOWN else [*pieces[:_SHOWN], "...", *pieces[-_SHOWN:]]
        yield f"{name}: kept {before.vocab_size:,} pieces, {len(pieces):,} new {', '.join(shown)}".rstrip()
        yield (
            f"  tokens per line: {sum(map(len, old_ids)) / n:.1f} before, {sum(map(len, new_ids)) / n:.1f} now; "
            f"unknown tokens: {n_unknown[0]:,} before, {n_unknown[1]:,} now; {n_unchanged / n:.0%} of the lines are "
            "tokenized as before"
        )
