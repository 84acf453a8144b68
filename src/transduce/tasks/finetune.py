"""Fine-tuning: start a run from the weights of another run (`training.start`).

The new run inherits the vocabulary, the shape of the model and the weights, and the settings that belong to them.
Settings that contradict them are refused. The weights are copied into the new run's folder, so that a resumed run no
longer needs the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config.kinds import kinds_for, preset_values, resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.section import Section
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors, save_tensors
from transduce.tasks.registry import find_task
from transduce.text.extension import SAMPLE_LINES, Extended, Parts, extend, new_pieces, of_characters
from transduce.text.hub import HubTokenizer
from transduce.text.special import MASK, MASK_PIECE, UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.text.training import sample_of
from transduce.text.vectors import VectorReader

_OWN = {
    "model": (
        *("kind", "dropout", "attention_dropout", "activation_dropout", "next_sentence", "pooling", "n_labels"),
        *("memory_length", "eval_memory_length"),
    ),
    "tokenizer": ("extend", "sampling", "start"),
}
"""Settings of these sections in which the new run may differ."""
_HEADS = ("head.", "output_bias", "output_embedding.", "next_sentence.", "pooler.", "labels.")
"""Prefixes of weights that not every model of a family has. Missing ones are initialized at random."""
_ROWS = {
    "src_embedding.table.weight": "src",
    "tgt_embedding.table.weight": "tgt",
    "embedding.table.weight": "tgt",
    "output_embedding.weight": "tgt",
    "output_bias": "tgt",
}
"""Weights with one row per piece, and the side of the vocabulary."""
_SHOWN = 3  # new pieces printed from each end of the list
_MEASURED = 2000  # lines per side tokenized before and after


@dataclass(frozen=True, slots=True)
class Start:
    """A run to fine-tune from, or whose tokenizer to use.

    `settings`: those asked for, with the inherited ones; `summary`: for people.
    """

    run: RunFolder
    settings: Settings
    summary: str


def find_start(asked: Settings) -> Start | None:
    """The run that `training.start` or `tokenizer.start` names, or None.

    Raises:
        SettingsError: The run's model does not fit the task, or the settings contradict the run's.
        RunFolderError: The folder is not a run, or is damaged.
    """
    extend_by = asked.tokenizer.extend
    if asked.training.start is None:
        if extend_by:
            raise SettingsError(f"tokenizer.extend = {extend_by}: there is no vocabulary to extend; set training.start")
        return _find_tokenizer(asked)
    if asked.tokenizer.start is not None:
        raise SettingsError(
            f"tokenizer.start = '{asked.tokenizer.start}': fine-tuning uses the vocabulary of training.start; leave it "
            "out"
        )
    resolve_preset(asked.model)  # raises for an unknown preset
    run, task = RunFolder.open(asked.training.start), find_task(asked.task)
    other = run.settings
    kinds = kinds_for(task.name)
    if asked.model.kind == kinds[0] and other.model.kind in kinds:
        asked = asked.with_values("model", kind=other.model.kind)
    family = ARCHITECTURES[asked.model.kind].family
    if ARCHITECTURES[other.model.kind].family != family:
        fitting = [name for name, architecture in ARCHITECTURES.items() if architecture.family == family]
        raise SettingsError(
            f"training.start = '{run.path}': its model is of kind '{other.model.kind}'; task '{asked.task}' needs "
            f"{' or '.join(fitting)}"
        )
    if extend_by and other.model.reads_vectors:
        raise SettingsError(
            f"tokenizer.extend = {extend_by}: {run.path} reads vectors, which have no vocabulary; leave it out"
        )
    if extend_by and other.tokenizer.kind == HubTokenizer.kind:
        raise SettingsError(
            f"tokenizer.extend = {extend_by}: {run.path} has a vocabulary of the tokenizers library, which cannot be "
            "extended; leave it out"
        )
    values = asked.model_dump(exclude_unset=True)
    values["model"] = _merged_section("model", asked, other, origin="training.start")
    values["tokenizer"] = _merged_section("tokenizer", asked, other, origin="training.start") | {"extend": extend_by}
    inherited = _inherited(asked, other, task.inherited)
    for (section, key), value in inherited.items():
        values.setdefault(section, {})[key] = value
    m = other.model
    parts = [
        f"starting from {run.path}: vocabulary ({_described_vocabulary(run)})",
        f"model ({m.kind}, d_model {m.d_model}, {' + '.join(map(str, m.depth))} layers)",
        *(f"{section}.{key} = {value}" for (section, key), value in inherited.items()),
    ]
    return Start(run, Settings.from_mapping(values), ", ".join(parts))


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
    unit = "numbers in each vector" if isinstance(tgt, VectorReader) else f"pieces, {run.settings.tokenizer.kind}"
    return f"{tgt.vocab_size:,} {unit}"


def extend_vocabulary(start: Start, src: Iterable[str], tgt: Iterable[str], log: Log) -> Extended:
    """The start's vocabulary, with `tokenizer.extend` more pieces learned from the text of both sides."""
    tokenizers, n = load_tokenizers(start.run), start.settings.tokenizer.extend
    if start.settings.task == "masked" and tokenizers.tgt.vocab_size > MASK:
        hub = start.settings.tokenizer.kind == HubTokenizer.kind
        if not hub and tokenizers.tgt.pieces([MASK]) != [MASK_PIECE]:
            raise SettingsError(
                f"training.start = '{start.run.path}': its vocabulary has no {MASK_PIECE}, which task 'masked' needs; "
                "start from a masked language model"
            )
    if not n:
        return Extended(tokenizers, (), ())
    src, tgt = (sample_of(lines, SAMPLE_LINES, seed=start.settings.training.seed) for lines in (src, tgt))
    found = extend(tokenizers, src, tgt, n=n)
    for line in _compare_vocabularies(tokenizers, found.tokenizers, src, tgt):
        log.say(line)
    if len(found.tgt) < n and of_characters(tokenizers.tgt):
        log.say(f"  fewer than {n:,}: a character vocabulary is extended by missing characters only")
    return found


def save_start_weights(start: Start, extended: Extended, settings: Settings, folder: Path) -> None:
    """Save the start's weights, with rows for the new pieces, into the new run's folder `tokens`."""
    tensors = start.run.load_model()
    tokenizers = extended.tokenizers
    sides = {"src": (extended.src, _ordinary(tokenizers.src)), "tgt": (extended.tgt, _ordinary(tokenizers.tgt))}
    same_labels = start.run.settings.data.labels == settings.data.labels
    kept = {
        name: with_rows(tensor, *sides[_ROWS[name]]) if name in _ROWS else tensor
        for name, tensor in tensors.items()
        if same_labels or not name.startswith("labels.")
    }
    folder.mkdir(exist_ok=True)
    save_tensors(folder / "start.safetensors", kept)


def with_rows(tensor: Tensor, parts: Sequence[Parts], first: int) -> Tensor:
    """Append a row to a tensor [V, ...] for each of `parts`: the mean of the rows of the pieces that make it up.

    A piece without parts gets the mean of all ordinary rows, which start at `first`. Logits are linear in the rows, so
    no new piece is more likely than the most likely old one.
    """
    if not parts:
        return tensor
    mean = tensor[first:].mean(0)
    return torch.cat([tensor, torch.stack([tensor[list(p)].mean(0) if p else mean for p in parts])])


def load_start_weights(model: nn.Module, folder: Path, log: Log) -> None:
    """Initialize a model from `save_start_weights`. Weights of heads that the start lacks stay random; log them."""
    found, own = load_tensors(folder / "start.safetensors"), model.state_dict()
    fitting = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    missing = [name for name in own if name not in fitting]
    if wrong := [name for name in missing if not name.startswith(_HEADS)]:
        raise SettingsError(f"training.start: the weights do not fit this model: {', '.join(wrong[:5])}")
    model.load_state_dict(fitting, strict=False)
    unused = [name for name in found if name not in fitting]
    parts = [f"{len(fitting)} of {len(own)} tensors loaded from training.start"]
    parts += [f"{label}: {', '.join(names)}" for label, names in (("random", missing), ("unused", unused)) if names]
    log.say("; ".join(parts))


def _merged_section(section: str, asked: Settings, other: Settings, *, origin: str) -> dict[str, Any]:
    """The other run's values of a section, with those in which the new run may differ. Raises for a contradiction.

    `origin`: the setting that names the other run.
    """
    ours: Section = getattr(asked, section)
    theirs: Section = getattr(other, section)
    found = {
        key: value
        for key, value in theirs.model_dump(exclude={"preset", "start"}).items()
        if key in type(ours).model_fields
    }
    given = {key: getattr(ours, key) for key in ours.model_fields_set}
    preset = given.pop("preset", None)
    for key, value in preset_values(ours).items() if isinstance(ours, ModelSettings) else ():
        if key not in (*given, *_OWN["model"]) and found.get(key, value) != value:
            raise SettingsError(
                f"model.preset = '{preset}' has {key} = {value!r}: {origin} has {found[key]!r}; leave it out"
            )
    for key, value in given.items():
        if key in _OWN[section]:
            found[key] = value
        elif value is not None and value != found.setdefault(key, value):
            hint = "; tokenizer.extend adds pieces" if key == "vocab_size" and origin == "training.start" else ""
            raise SettingsError(f"{section}.{key} = {value!r}: {origin} has {found[key]!r}; leave it out{hint}")
    if section == "tokenizer" and "sampling" not in given:
        found["sampling"] = 0.0
    return found


def _inherited(asked: Settings, other: Settings, names: Sequence[str]) -> dict[tuple[str, str], Any]:
    """By (section, key): settings of `names` that are unset here and not at their default in the other run."""
    if asked.task != other.task:
        return {}
    found = {}
    for section, key in (name.split(".") for name in names):
        ours, theirs = getattr(asked, section), getattr(other, section)
        default = type(ours).model_fields[key].default
        if key not in ours.model_fields_set and getattr(theirs, key) not in (None, default):
            found[section, key] = getattr(theirs, key)
    return found


def _ordinary(vocabulary: Vocabulary) -> int:
    """The first id that is not special."""
    return MASK + (vocabulary.pieces([MASK]) == [MASK_PIECE])


def _compare_vocabularies(old: Tokenizers, new: Tokenizers, src: Sequence[str], tgt: Sequence[str]) -> Iterator[str]:
    """Lines on what the extension of each vocabulary changes."""
    sides = [("source vocabulary", old.src, new.src, src), ("target vocabulary", old.tgt, new.tgt, tgt)]
    if old.joint:
        sides = [("vocabulary", old.tgt, new.tgt, [*src[:_MEASURED], *tgt[:_MEASURED]])]
    for name, before, after, text in sides:
        pieces, sample = new_pieces(before, after), text[: 2 * _MEASURED]
        then, now = before.encode_batch(sample), after.encode_batch(sample)
        n = max(1, len(sample))
        same = sum(ids == was for ids, was in zip(now, then, strict=True))
        unknown = [sum(ids.count(UNK) for ids in found) for found in (then, now)]
        shown = pieces if len(pieces) <= 2 * _SHOWN else [*pieces[:_SHOWN], "...", *pieces[-_SHOWN:]]
        yield f"{name}: kept {before.vocab_size:,} pieces, {len(pieces):,} new {', '.join(shown)}".rstrip()
        yield (
            f"  tokens per line: {sum(map(len, then)) / n:.1f} before, {sum(map(len, now)) / n:.1f} now; "
            f"unknown tokens: {unknown[0]:,} before, {unknown[1]:,} now; {same / n:.0%} of the lines are tokenized as "
            "before"
        )
