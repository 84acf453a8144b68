"""Fixtures of the comparisons with other libraries."""

import pytest

from transduce.convert import seq2seq_vocabulary


@pytest.fixture
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept vocabularies that lack many pieces, as those of small random models do."""
    monkeypatch.setattr(seq2seq_vocabulary, "_MOST_MISSING", 1.0)
