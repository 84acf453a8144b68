"""A run that another one begins with: `training.start`, or `--from`. Fine-tuning.

Its vocabulary, the shape of its model and its weights are taken over, and of its settings those that the new run has no
wish for and that follow from them. What would contradict them is refused. All that a resumed training needs of it is
then in the new run's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config import ModelSettings, Settings, resolve_preset
from transduce.config.model import preset_values
from transduce.config.section import Section
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import ARCHITECTURES
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors, save_tensors
from transduce.text.extension import SAMPLE_LINES, Extended, Parts, extend, new_pieces, of_characters
from transduce.text.hub import HubTokenizer
from transduce.text.special import MASK, MASK_PIECE, UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.text.training import sample_of

_OWN = {
    "model": ("kind", "dropout", "attention_dropout", "activation_dropout", "next_sentence", "pooling", "n_labels"),
    "tokenizer": ("extend", "sampling"),
}
"""What the new run may have otherwise, or has as it is by itself."""
_HEADS = ("head.", "output_bias", "output_embedding.", "next_sentence.", "pooler.", "labels.")
"""Names of weights that another kind of model of the family may lack; they begin fresh."""
_ROWS = {
    "src_embedding.table.weight": "src",
    "tgt_embedding.table.weight": "tgt",
    "embedding.table.weight": "tgt",
    "output_embedding.weight": "tgt",
    "output_bias": "tgt",
}
"""Weights with a row a piece, and of which side's vocabulary."""
_SHOWN = 3
_MEASURED = 2000  # lines whose cutting before and after is compared


@dataclass(frozen=True, slots=True)
class Start:
    """A run to begin with. `settings`: what was asked for, with what comes from the run; `took`: what, for people."""

    run: RunFolder
    settings: Settings
    took: str


def find_start(asked: Settings, *, kind: str, inherited: Sequence[str] = ()) -> Start | None:
    """The run that a training of a model of this kind is to begin with; None where it begins fresh.

    Raises `SettingsError` for a run of another family, and for wishes that contradict it; `RunFolderError` for a folder
    that is no run, or damaged.
    """
    if asked.training.start is None:
        if asked.tokenizer.extend:
            raise SettingsError(
                f"tokenizer.extend = {asked.tokenizer.extend}: there is no vocabulary to extend; name a run with --from"
            )
        return None
    resolve_preset(asked.model)  # refuses one that there is not
    run = RunFolder.open(asked.training.start)
    other = run.settings
    family = ARCHITECTURES[kind].family
    if ARCHITECTURES[other.model.kind].family != family:
        fitting = [name for name, architecture in ARCHITECTURES.items() if architecture.family == family]
        raise SettingsError(
            f"training.start = '{run.path}': its model is of kind '{other.model.kind}'; task '{asked.task}' needs "
            f"{' or '.join(fitting)}"
        )
    if asked.tokenizer.extend and other.tokenizer.kind == HubTokenizer.kind:
        raise SettingsError(
            f"tokenizer.extend = {asked.tokenizer.extend}: the vocabulary of {run.path} is one of the tokenizers "
            "library, which stays as it came; leave --extend-vocabulary out"
        )
    values = asked.model_dump(exclude_unset=True)
    values["model"] = _agreed("model", asked, other)
    values["tokenizer"] = _agreed("tokenizer", asked, other) | {"extend": asked.tokenizer.extend}
    taken = _inherited(asked, other, inherited)
    for (section, key), value in taken.items():
        values.setdefault(section, {})[key] = value
    m = other.model
    size = f"d_model {m.d_model}, {' + '.join(map(str, m.depth))} layers"
    more = ", ".join(f"{section}.{key} = {value}" for (section, key), value in taken.items())
    took = (
        f"begins with {run.path}: its vocabulary ({load_tokenizers(run).n_tgt:,} pieces, {other.tokenizer.kind}), its "
        f"model ({other.model.kind}, {size})" + (f", {more}" if more else "")
    )
    return Start(run, Settings.from_mapping(values), took)


def learn_more(start: Start, src: Iterable[str], tgt: Iterable[str], log: Log) -> Extended:
    """The start's vocabulary, with more pieces from the text of both sides (as `extend`) where that is asked for."""
    tokenizers, n = load_tokenizers(start.run), start.settings.tokenizer.extend
    if start.settings.task == "masked" and tokenizers.tgt.vocab_size > MASK:
        hub = start.settings.tokenizer.kind == "hub"
        if not hub and tokenizers.tgt.pieces([MASK]) != [MASK_PIECE]:
            raise SettingsError(f"the vocabulary of {start.run.path} has no {MASK_PIECE}: it is of no masked model")
    if not n:
        return Extended(tokenizers, (), ())
    src, tgt = (sample_of(lines, SAMPLE_LINES, seed=start.settings.training.seed) for lines in (src, tgt))
    found = extend(tokenizers, src, tgt, n=n)
    for line in _told(tokenizers, found.tokenizers, src, tgt):
        log.say(line)
    if len(found.tgt) < n and of_characters(tokenizers.tgt):
        log.say(
            f"  fewer than {n:,}: a vocabulary of characters gets the characters that it lacks, and no longer pieces"
        )
    return found


def keep(start: Start, extended: Extended, settings: Settings, folder: Path) -> None:
    """Write the weights to begin with into a folder, with rows for the new pieces: the start is not needed any more."""
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
    """A tensor [V, ...] with a row more for each of `parts`: the mean of the rows of the pieces that it is made of.

    What is made of none gets the mean of all ordinary rows, which begin with `first`. A logit, which is linear in its
    row, is then the mean of others: no new piece is likelier than the likeliest old one.
    """
    if not parts:
        return tensor
    whole = tensor[first:].mean(0)
    return torch.cat([tensor, torch.stack([tensor[list(p)].mean(0) if p else whole for p in parts])])


def begin(model: nn.Module, folder: Path, log: Log) -> None:
    """Give a fresh model the weights that `keep` wrote; what these have not stays as it is, and is told."""
    found, own = load_tensors(folder / "start.safetensors"), model.state_dict()
    fitting = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    lacking = [name for name in own if name not in fitting]
    if wrong := [name for name in lacking if not name.startswith(_HEADS)]:
        raise SettingsError(f"the run to begin with does not fit: {', '.join(wrong[:5])}")
    model.load_state_dict(fitting, strict=False)
    left = [name for name in found if name not in fitting]
    fresh = f"; fresh: {', '.join(lacking)}" if lacking else ""
    unused = f"; not used: {', '.join(left)}" if left else ""
    log.say(f"{len(fitting)} of {len(own)} tensors are those of the run that it begins with{fresh}{unused}")


def _agreed(section: str, asked: Settings, other: Settings) -> dict[str, Any]:
    """The values of a section: the other's, and what the new run may have of its own. Refuses what contradicts."""
    ours: Section = getattr(asked, section)
    theirs: Section = getattr(other, section)
    found = {
        key: value for key, value in theirs.model_dump(exclude={"preset"}).items() if key in type(ours).model_fields
    }
    given = {key: getattr(ours, key) for key in ours.model_fields_set}
    preset = given.pop("preset", None)
    for key, value in preset_values(ours).items() if isinstance(ours, ModelSettings) else ():
        if key not in (*given, *_OWN["model"]) and found.get(key, value) != value:
            raise SettingsError(
                f"model.preset = '{preset}' has {key} = {value!r}: the run to begin with has {found[key]!r}; "
                "leave it out"
            )
    for key, value in given.items():
        if key in _OWN[section]:
            found[key] = value
        elif value is not None and value != found.setdefault(key, value):
            hint = "; --extend-vocabulary adds pieces" if key == "vocab_size" else ""
            raise SettingsError(
                f"{section}.{key} = {value!r}: the run to begin with has {found[key]!r}; leave it out{hint}"
            )
    if section == "tokenizer" and "sampling" not in given:
        found["sampling"] = 0.0
    return found


def _inherited(asked: Settings, other: Settings, names: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Settings that the new run leaves unset and the other, of the same task, has."""
    if asked.task != other.task:
        return {}
    found = {}
    for section, key in (name.split(".") for name in names):
        ours, theirs = getattr(asked, section), getattr(other, section)
        usual = type(ours).model_fields[key].default
        if key not in ours.model_fields_set and getattr(theirs, key) not in (None, usual):
            found[section, key] = getattr(theirs, key)
    return found


def _ordinary(vocabulary: Vocabulary) -> int:
    """The first id that is no special one."""
    return MASK + (vocabulary.pieces([MASK]) == [MASK_PIECE])


def _told(old: Tokenizers, new: Tokenizers, src: Sequence[str], tgt: Sequence[str]) -> list[str]:
    """What is kept, what is new, and what it changes, a vocabulary a line."""
    if old.joint:
        sides: Mapping[str, tuple[Vocabulary, Vocabulary, Sequence[str]]] = {
            "vocabulary": (old.tgt, new.tgt, [*src[:_MEASURED], *tgt[:_MEASURED]])
        }
    else:
        sides = {"source vocabulary": (old.src, new.src, src), "target vocabulary": (old.tgt, new.tgt, tgt)}
    lines = []
    for name, (before, after, text) in sides.items():
        pieces, sample = new_pieces(before, after), text[: 2 * _MEASURED]
        then, now = before.encode_batch(sample), after.encode_batch(sample)
        n = max(1, len(sample))
        same = sum(ids == was for ids, was in zip(now, then, strict=True))
        unknown = [sum(ids.count(UNK) for ids in found) for found in (then, now)]
        shown = ", ".join(pieces if len(pieces) <= 2 * _SHOWN else pieces[:_SHOWN] + pieces[-_SHOWN:])
        lines += [
            f"{name}: kept {before.vocab_size:,} pieces, {len(pieces):,} new" + (f", as {shown}" if pieces else ""),
            f"  tokens a line {sum(map(len, then)) / n:.1f} before, {sum(map(len, now)) / n:.1f} now; unknown ones "
            f"{unknown[0]:,} before, {unknown[1]:,} now; {same / n:.0%} of the lines are cut as before",
        ]
    return lines
