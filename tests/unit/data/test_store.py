"""The token store: ids are read back, a damaged or foreign store is never used, memory stays bounded."""

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transduce.config.settings import Corpus, DataSettings, Settings, TokenizerSettings, TrainingSettings
from transduce.data import encoding
from transduce.data.clean import Cleaner, CleanReport, pack_pairs
from transduce.data.encoding import EncodePairs, counted, encode_pairs
from transduce.data.leaks import comparable
from transduce.data.pairs import Pair, read_pairs
from transduce.data.reading import pair_sources
from transduce.data.store import Example, TokenStore
from transduce.errors import DataError, RunFolderError
from transduce.tasks import base
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizers, with_language_tokens
from transduce.training.feed import DataPosition, SubwordSampling

SRC = [f"the {a} dog sees {n} {b}" for n in range(30) for a in ("old", "young") for b in ("cats", "red birds")]
TGT = [f"der {a} Hund sieht {n} {b}" for n in range(30) for a in ("alte", "junge") for b in ("Katzen", "rote Vögel")]
TOKENIZERS = train_tokenizers(SRC, TGT, TokenizerSettings(joint=False), vocab_size=60)
SETTINGS = DataSettings(max_length=40)
ENCODE = EncodePairs(TOKENIZERS, SETTINGS)


def pairs(n: int = len(SRC)) -> Iterator[Pair]:
    return (Pair(SRC[i], TGT[i], "a.tsv", i + 1) for i in range(n))


def encoded(folder: Path, streams: list[Iterable[Pair]], both: Tokenizers = TOKENIZERS, **options: Any) -> TokenStore:
    """Clean and encode."""
    cleaner = Cleaner(SETTINGS)
    cleaned = [
        [record | {"corpus": np.array([i])} for record in pack_pairs(filter(None, map(cleaner.by_rules, stream)))]
        for i, stream in enumerate(streams)
    ]
    return encode_pairs(folder, cleaned, EncodePairs(both, SETTINGS), report=cleaner.report, **options)


def build(folder: Path) -> TokenStore:
    return encoded(folder, [pairs()])


def contents(store: TokenStore) -> list[tuple[list[int], list[int]]]:
    return [(src.tolist(), tgt.tolist()) for src, tgt in (store[i] for i in range(len(store)))]


def test_ids_are_read_back_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "chunk", 7)
    folder = tmp_path / "tokens"
    expected = list(zip(TOKENIZERS.src.encode_batch(SRC), TOKENIZERS.tgt.encode_batch(TGT), strict=True))
    for store in (build(folder), TokenStore.open(folder)):
        assert contents(store) == expected
        assert store.src.dtype == np.uint16
        assert store.src_lengths.tolist() == [len(src) + 1 for src, _ in expected]
        assert store.tgt_lengths.tolist() == [len(tgt) + 1 for _, tgt in expected]
        assert store.src_lengths.dtype == store.tgt_lengths.dtype == np.uint16
        assert len(store.src) == sum(len(s) for s, _ in expected)
        assert len(store.tgt) == sum(len(t) for _, t in expected)
        assert UNK not in store.src and store.facts["sizes"] == [len(SRC)]
        with pytest.raises(IndexError):
            store[len(SRC)]
    assert [p.name for p in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.parametrize("joint", [True, False])
def test_directions_have_language_tokens_and_reversed_corpora_are_held_out_by_the_same_sources(
    tmp_path: Path, joint: bool
) -> None:
    directions = [("en", "de"), ("de", "en")]
    plain = train_tokenizers([*SRC, *TGT], [*TGT, *SRC], TokenizerSettings(joint=joint), vocab_size=80)
    both = with_language_tokens(plain, directions, src=("src", "tgt"))
    assert both.joint == joint and both.n_src == plain.n_src + 2 and both.n_tgt == plain.n_tgt + 2 * joint
    function = EncodePairs(both, SETTINGS, directions, first_reversed=1, without=frozenset({comparable(SRC[1])}))
    records = [list(pack_pairs(pairs(4), corpus=i)) for i in range(2)]
    report = CleanReport(read=4, held_out=1)
    store = encode_pairs(tmp_path / "tokens", records, function, report=report)
    en, de = plain.n_src, plain.n_src + 1
    kept = (0, 2, 3)
    assert contents(store) == [
        *(([en, de, *plain.src.encode(SRC[i])], plain.tgt.encode(TGT[i])) for i in kept),
        *(([de, en, *plain.src.encode(TGT[i])], plain.tgt.encode(SRC[i])) for i in kept),
    ]
    assert store.facts["sizes"] == [3, 3] and store.facts["cleaning"]["kept"] == 3
    segment = SubwordSampling(both, amount=1.0, seed=1, max_length=40)
    sampled = segment([Example(*store[i]) for i in range(6)], DataPosition(0, 0))
    assert [list(example.src[:2]) for example in sampled] == [[en, de]] * 3 + [[de, en]] * 3
    assert [both.src.decode(example.src) for example in sampled[:3]] == [SRC[i] for i in kept]
    assert any(len(example.src) != len(store[i][0]) for i, example in enumerate(sampled))


def test_several_corpora_with_weights_and_one_report(tmp_path: Path) -> None:
    odd = [Pair("the dog", "", "b.tsv", 1), Pair("the old dog Ω", "der Hund", "b.tsv", 2)]
    long = Pair("the dog " * 30, "der Hund", "b.tsv", 3)
    store = encoded(tmp_path / "t", [pairs(10), [*odd, long], pairs(5)])
    assert store.facts["sizes"] == [10, 1, 5] and np.count_nonzero(store.src == UNK) == 1 and UNK not in store.tgt
    assert store.weights([1, 1.0, 1]) is None
    weights = store.weights([1, 2, 0.5])
    assert weights is not None and weights.tolist() == [1.0] * 10 + [2.0] + [0.5] * 5
    weights = store.weights([1, 4, 1], temperature=2)  # amounts 10, 4 and 5 of 19
    roots = np.sqrt([10, 4, 5])
    expected = 19 * roots / roots.sum() / [10, 1, 5]
    assert weights is not None and np.allclose(weights[[0, 10, 11]], expected) and weights.sum() == pytest.approx(19)
    assert store.facts["cleaning"]["read"] == 18 and store.facts["cleaning"]["kept"] == 16
    assert [(r["reason"], r["count"], r["samples"][0]["place"]) for r in store.facts["cleaning"]["dropped"]] == [
        ("empty", 1, "b.tsv:1"),
        ("too long", 1, "b.tsv:3"),
    ]


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_CHUNK", 50)
    reported: list[int] = []
    assert list(counted(pairs(), reported.append)) == list(pairs())
    assert reported == [50, 100, 120]


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path: Path) -> None:
    class Many:
        vocab_size = 70_000
        model, chunk = b"", 10
        stored_as, framing = Vocabulary.stored_as, Vocabulary.framing
        with_frame, framed, frame = Vocabulary.with_frame, Vocabulary.framed, ()

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[69_999] for _ in texts]

    both = Tokenizers.__new__(Tokenizers)
    object.__setattr__(both, "src", Many())
    object.__setattr__(both, "tgt", Many())
    store = encoded(tmp_path / "t", [pairs(3)], both)
    assert store.src.dtype == np.int32 and store[2][0].tolist() == [69_999]


@pytest.mark.parametrize("name", ["src.npy", "tgt.npy", "src_offsets.npy", "tgt_offsets.npy", "store.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
    ],
    ids=["cut", "emptied", "removed"],
)
def test_a_damaged_store_is_named_and_built_again(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "tokens"
    wanted = contents(build(folder))
    damage(folder / name)
    with pytest.raises(RunFolderError, match=name.split(".")[0]) as caught:
        TokenStore.open(folder)
    assert "\n" not in str(caught.value)
    assert contents(build(folder)) == wanted


def test_a_store_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "t")
    facts = json.loads((tmp_path / "t" / "store.json").read_text())
    (tmp_path / "t" / "store.json").write_text(json.dumps(facts | {"format": 999}))
    with pytest.raises(RunFolderError, match="not a store of format 1"):
        TokenStore.open(tmp_path / "t")


def files(folder: Path, name: str = "a") -> Corpus:
    (folder / f"{name}.en").write_text("\n".join(SRC), encoding="utf-8")
    (folder / f"{name}.de").write_text("\n".join(TGT), encoding="utf-8")
    return Corpus(src=folder / f"{name}.en", tgt=folder / f"{name}.de")


def fingerprint(
    corpora: list[Corpus], settings: DataSettings = SETTINGS, both: Tokenizers = TOKENIZERS, seed: int = 1
) -> str:
    data = settings.model_copy(update={"train": tuple(corpora)})
    asked = Settings(data=data, training=TrainingSettings(seed=seed))
    return base.fingerprint(asked, both, [source.mark() for source in pair_sources(asked).train])


def test_fingerprint_depends_on_content_vocabulary_and_cleaning(tmp_path: Path) -> None:
    corpus = files(tmp_path)
    base = fingerprint([corpus])
    assert base == fingerprint([corpus]) and len(base) == 64
    assert fingerprint([files(tmp_path, "b")]) == base  # another name, the same text
    assert fingerprint([corpus.model_copy(update={"weight": 2.0})]) == base
    assert corpus.src is not None
    others = [
        fingerprint([corpus, corpus]),
        fingerprint([Corpus(src=corpus.tgt, tgt=corpus.src)]),
        fingerprint([corpus], DataSettings(max_length=41)),
        fingerprint([corpus], DataSettings(max_length=40, deduplicate=True)),
        fingerprint([corpus], both=Tokenizers(TOKENIZERS.tgt, TOKENIZERS.src)),
        fingerprint([corpus], seed=2),
    ]
    corpus.src.write_text("\n".join([*SRC[:-1], SRC[-1] + "x"]), encoding="utf-8")
    others.append(fingerprint([corpus]))
    assert len({base, *others}) == 8
    corpus.src.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.en: No such file or directory"):
        fingerprint([corpus])


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([], "training text: no sentence pair found"),
        ([[]], "training text: no sentence pair found"),
        ([[Pair("", "", "a", 1)]], "training text: no sentence pair of 1 is left: 1 empty"),
        ([[Pair("dog " * 99, "Hund", "a", 1)]], "training text: no sentence pair of 1 is left: 1 too long; raise"),
    ],
)
def test_an_empty_corpus_is_refused_and_leaves_no_files(
    tmp_path: Path, streams: list[list[Pair]], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        encoded(tmp_path / "t", [*streams])
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_text_keeps_the_old_store(tmp_path: Path) -> None:
    build(tmp_path / "t")
    (tmp_path / "bad.tsv").write_bytes(b"the dog\tder Hund\n\xff\t\n")
    with pytest.raises(DataError, match="line 2: not valid UTF-8"):
        stream = read_pairs(Corpus(path=tmp_path / "bad.tsv"), DataSettings())
        encode_pairs(tmp_path / "t", [pack_pairs(stream)], ENCODE, report=CleanReport())
    assert len(TokenStore.open(tmp_path / "t")) == len(SRC)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tsv", "t"]


def test_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vocabulary, "chunk", 100)
    peaks = []
    for n in (5, 60):
        stream, read = (pair for _ in range(n) for pair in pairs()), CleanReport(read=n * len(SRC))
        tracemalloc.start()
        store = encode_pairs(tmp_path / "t", [pack_pairs(stream, 100)], ENCODE, report=read)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(store) == n * len(SRC)
    ids = (len(store.src) + len(store.tgt)) * 8 * 55 // 60  # the size of the other ids as lists
    assert ids > 2 << 20 > 1 << 20 > peaks[1] - peaks[0]  # lengths, and the block of which the checksum is computed


def test_a_store_in_memory() -> None:
    store = TokenStore.from_lists([[5, 6], [], [7]], [[8], [9, 10, 11], [12]])
    assert contents(store) == [([5, 6], [8]), ([], [9, 10, 11]), ([7], [12])]
    assert store.src_lengths.tolist() == [3, 1, 2] and len(store) == 3 and store.weights([2.0]) is None


def test_lengths_that_do_not_fit_two_bytes_are_kept() -> None:
    short, long = TokenStore.from_lists([[5] * 9], [[6]]), TokenStore.from_lists([[5] * 70_000, []], [[6], [7]])
    assert short.src_lengths.tolist() == [10] and short.src_lengths.dtype == np.uint16
    assert long.src_lengths.tolist() == [70_001, 1] and long.tgt_lengths.tolist() == [2, 2]
    assert [lengths.tolist() for lengths in long.lengths_of(np.array([1, 0], dtype=np.int32))] == [[1, 70_001], [2, 2]]
