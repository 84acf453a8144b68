"""Alignment error rate, precision and recall of word alignments (Och and Ney 2003, section 5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from transduce.data.word_links import GoldLinks, WordLink


@dataclass(frozen=True, slots=True)
class AlignmentScore:
    """Counts of links over all sentence pairs: `sure` of the gold links, `found`, and found that are sure or possible.

    Fractions are of 1; of no links at all, precision and recall are 1 and the error rate is 0.
    """

    sure: int
    found: int
    found_sure: int
    found_possible: int

    @property
    def precision(self) -> float:
        """|A & P| / |A|: of the links found, those that are at least possible."""
        return self.found_possible / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        """|A & S| / |S|: of the sure links, those that are found."""
        return self.found_sure / self.sure if self.sure else 1.0

    @property
    def error_rate(self) -> float:
        """1 - (|A & S| + |A & P|) / (|A| + |S|)."""
        n = self.found + self.sure
        return 1 - (self.found_sure + self.found_possible) / n if n else 0.0

    def line(self) -> str:
        """The score, for people."""
        rates = f"AER {self.error_rate:.2%}  precision {self.precision:.2%}  recall {self.recall:.2%}"
        return f"{rates}  ({self.found:,} links, {self.sure:,} sure gold links)"


def score_links(found: Iterable[Collection[WordLink]], gold: Iterable[GoldLinks]) -> AlignmentScore:
    """Compare the links of each sentence pair with its gold links; a sure link is possible too."""
    sure = n_found = found_sure = found_possible = 0
    for links, known in zip(found, gold, strict=True):
        sure += len(known.sure)
        n_found += len(set(links))
        found_sure += len(known.sure & set(links))
        found_possible += len(known.possible & set(links))
    return AlignmentScore(sure, n_found, found_sure, found_possible)
