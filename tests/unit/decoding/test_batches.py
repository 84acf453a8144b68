from __future__ import annotations

from pathlib import Path

import marians
from transduce.decoding.batches import Sentence, once
from transduce.decoding.translator import Translator


def test_the_first_of_each_stays_and_the_others_are_known_by_it() -> None:
    sentences = [Sentence(i, ids, 9) for i, ids in enumerate([[1, 2], [3], [1, 2], [2, 1], [1, 2], [3]])]
    firsts, others = once(sentences)
    assert [s.number for s in firsts] == [0, 1, 3] and others == {0: [2, 4], 1: [5]}
    assert once([]) == ([], {})


def test_what_occurs_again_is_translated_the_same_and_samples_are_drawn_anew(tmp_path: Path) -> None:
    translator = Translator.load(marians.make_run(tmp_path / "run"))
    lines = [marians.LINES[i] for i in (0, 5, 0, 0, 7, 5)]
    found = translator.translate(lines, beam=2, n_best=2)
    for line, translation in zip(lines, found, strict=True):
        assert translation == translator.translate([line], beam=2, n_best=2)[0]
    drawn = [one.text for one in translator.sample([lines[0]] * 8)]
    assert len(set(drawn)) > 1
