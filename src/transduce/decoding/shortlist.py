"""Shortlists: the few target tokens that the translation of a sentence may consist of.

A shortlist has, for each source token, the target tokens that most often translate it, and the most frequent target
tokens. The logits of other tokens are not computed, which is most of the work of a small model (Jean et al. 2015,
section 3.2; Junczys-Dowmunt et al. 2018, section 2.4). `transduce shortlist` makes the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from safetensors.numpy import load

from transduce.errors import RunFolderError, SettingsError
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import ERRORS, damaged, read_tensors
from transduce.text.special import BOS, EOS, PAD, UNK
from transduce.text.tokenizer import Tokenizers

FILE = "shortlist.safetensors"
MOST_TOKENS = 2048
"""A sentence with a longer list, or with one of half of the vocabulary, may use all tokens."""


class Shortlist:
    """The target tokens of each source token (`candidates`, [n_src, n]), and those of all sentences (`frequent`)."""

    def __init__(self, candidates: np.ndarray, frequent: np.ndarray, *, n_tgt: int, digest: str = "") -> None:
        """Raises `ValueError` for ids that are no tokens of an output. `digest`: of the file."""
        if candidates.ndim != 2 or frequent.ndim != 1:
            raise ValueError(f"shapes {candidates.shape} and {frequent.shape}")
        for ids in (candidates, frequent):
            if ids.dtype != np.int32 or (ids.size and not (ids.min() >= 0 and ids.max() < n_tgt)):
                raise ValueError(f"it must contain ids below {n_tgt} as 32-bit integers")
            if np.isin(ids, (PAD, BOS)).any():
                raise ValueError("it contains padding or the start of a sentence")
        self.candidates, self.frequent, self._n_tgt = candidates, frequent, n_tgt
        self.digest = digest

    def tokens(self, ids: Sequence[int], prefix: Sequence[int] = ()) -> np.ndarray | None:
        """The tokens for the translation of a sentence, ascending, with those of its prefix; None: all."""
        found = np.zeros(self._n_tgt, np.bool_)
        found[self.candidates[ids]] = True
        found[self.frequent] = True
        found[[EOS, UNK, *prefix]] = True
        tokens = np.flatnonzero(found).astype(np.int32)
        return tokens if len(tokens) <= min(MOST_TOKENS, self._n_tgt // 2) else None


def load_shortlist(folder: RunFolder, tokenizers: Tokenizers) -> Shortlist:
    """The shortlist of a run. Raises `SettingsError`: there is none for its vocabularies; `RunFolderError`: damaged."""
    path = folder.path / FILE
    if not path.exists():
        raise SettingsError(f"{folder.path} has no shortlist; make one with `transduce shortlist {folder.path}`")
    content, header = read_tensors(path)
    if header.metadata.get("vocabularies") != folder.vocabularies_digest():
        raise SettingsError(f"{path} is for other vocabularies; make it again with `transduce shortlist {folder.path}`")
    try:
        tensors = load(content)
        ids = tensors["candidates"], tensors["frequent"]
        shortlist = Shortlist(*ids, n_tgt=tokenizers.n_tgt, digest=header.metadata["sha256"])
    except ERRORS as error:
        raise damaged(path, error) from None
    if len(shortlist.candidates) != tokenizers.n_src:
        raise RunFolderError(f"{path} is damaged: it has {len(shortlist.candidates)} rows, not {tokenizers.n_src}")
    return shortlist
