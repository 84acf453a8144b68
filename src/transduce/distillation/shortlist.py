"""Make the shortlist of a run from its training text. See `transduce.decoding.shortlist`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transduce.config.decoding import DecodingOptions
from transduce.config.section import MAX_BEAM
from transduce.data.corpus import Pair
from transduce.data.lexicon import TokenPair, learn_lexicon, n_links
from transduce.decoding.loading import check_reads_text, open_folder
from transduce.decoding.shortlist import FILE, Shortlist
from transduce.decoding.translator import Translator
from transduce.distillation.training_text import read_training_text, text_settings
from transduce.errors import SettingsError
from transduce.evaluation.evaluate import score_translator
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import save_tensors
from transduce.text.special import EOS
from transduce.text.tokenizer import Tokenizers, load_tokenizers

MOST_PAIRS = 1 << 20  # sentence pairs in memory
MOST_LINKS = 100_000_000  # of Model 1: about 2 GB of memory
MOST_VALID = 2000  # validation sentences that are translated
_BATCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortlistOptions:
    """The number of tokens of a list: `n_best` per source token, and the `n_frequent` most frequent ones.

    `max_loss`: BLEU that translation of the validation text may lose.
    """

    n_best: int = 50
    n_frequent: int = 100
    max_loss: float = 0.1

    def __post_init__(self) -> None:
        for name, most in (("n_best", MAX_BEAM), ("n_frequent", 1 << 16)):
            if not 1 <= getattr(self, name) <= most:
                raise SettingsError(f"{name} = {getattr(self, name)}: must be from 1 to {most:,}")


_DEFAULT = ShortlistOptions()


def make_shortlist(
    run: str | Path,
    options: ShortlistOptions = _DEFAULT,
    *,
    changes: Mapping[str, Any] | None = None,
    data: Path | None = None,
    log: Log | None = None,
) -> Path:
    """Write the shortlist of a translator from its training text; returns the file, in the run folder.

    Args:
        run: Run folder of a translator.
        options: How many tokens a list has.
        changes: Settings of other text to read: {"data": {"train": [...]}}.
        data: Folder with the training text, if it has moved since the training.
        log: For progress (default: to stderr).

    Raises:
        UserError: The run, its text or a setting cannot be used, or the shortlist loses too much.
    """
    log, given, folder = log or Log(), dict(changes or {}), open_folder(run, task=Translator.task)
    if others := sorted(given.keys() - {"data"}):
        raise SettingsError(f"{', '.join(others)}: no effect on a shortlist; only settings of data have one")
    check_reads_text(folder, "a shortlist")
    settings = text_settings(folder, given, data)
    texts = read_training_text(folder, settings, log, check="data" not in given)
    step = -(-texts.train.size // MOST_PAIRS)
    lines = [(pair.src, pair.tgt) for pair in islice(texts.train.read(), None, None, step)]
    tokenizers = load_tokenizers(folder)
    pairs = _within_memory(_encoded(lines, tokenizers))
    log.say(f"learning a lexicon from {len(pairs):,} of {texts.train.size:,} sentence pairs")
    with log.progress("IBM Model 1") as bar:
        lexicon = learn_lexicon(pairs, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt, progress=bar.update)
    candidates = lexicon.best(tokenizers.n_src, options.n_best, fill=EOS)
    if tokenizers.joint:  # names and numbers are copied
        own = np.arange(tokenizers.n_src, dtype=np.int32)
        candidates = np.column_stack([candidates, np.where(own > EOS, own, EOS).astype(np.int32)])
    frequent = _most_frequent(pairs, options.n_frequent, tokenizers.n_tgt)
    found = Shortlist(candidates, frequent, n_tgt=tokenizers.n_tgt)
    _check_loss(folder, found, list(islice(texts.valid.read(), MOST_VALID)), options.max_loss, log)
    return _save(folder, found, options)


def _encoded(lines: Sequence[tuple[str, str]], tokenizers: Tokenizers) -> list[TokenPair]:
    pairs: list[TokenPair] = []
    for first in range(0, len(lines), _BATCH):
        src, tgt = zip(*lines[first : first + _BATCH], strict=True)
        pairs += zip(tokenizers.src.encode_batch(src), tokenizers.tgt.encode_batch(tgt), strict=True)
    return pairs


def _within_memory(pairs: list[TokenPair]) -> list[TokenPair]:
    while len(pairs) > 1 and sum(map(n_links, pairs)) > MOST_LINKS:
        pairs = pairs[::2]
    return pairs


def _most_frequent(pairs: Sequence[TokenPair], n: int, n_tgt: int) -> np.ndarray:
    counts = np.zeros(n_tgt, np.int64)
    for _, tgt in pairs:
        np.add.at(counts, np.array(tgt, np.int64), 1)
    best = np.argsort(-counts, kind="stable")[:n]
    return best[counts[best] > 0].astype(np.int32)


def _check_loss(folder: RunFolder, found: Shortlist, valid: Sequence[Pair], most: float, log: Log) -> None:
    """Compare BLEU with and without the shortlist, with the run's search options in float32."""
    loaded = Translator.load(folder.path, device="cpu")
    translator = Translator(
        loaded.engine,
        loaded.tokenizers,
        settings=loaded.settings,
        position_limit=loaded.position_limit,
        shortlist=lambda: found,
    )
    pairs, scoring = [(pair.src, pair.tgt) for pair in valid], folder.settings.evaluation
    before, after = (
        score_translator(translator, pairs, scoring, DecodingOptions(shortlist=shortlist))[0].bleu.value
        for shortlist in (False, True)
    )
    bleu = f"BLEU of {len(valid):,} validation sentences: {before:.2f} without the shortlist, {after:.2f} with it"
    log.say(bleu)
    if before - after > most:
        raise SettingsError(
            f"max_loss = {most}: nothing was written, as the shortlist loses more ({bleu}); allow more, or try other "
            "values of n_best and n_frequent"
        )


def _save(folder: RunFolder, found: Shortlist, options: ShortlistOptions) -> Path:
    path = folder.path / FILE
    tensors = {"candidates": torch.from_numpy(found.candidates), "frequent": torch.from_numpy(found.frequent)}
    made = {"n_best": str(options.n_best), "n_frequent": str(options.n_frequent)}
    save_tensors(path, tensors, {"vocabularies": folder.vocabularies_digest(), **made})
    return path
