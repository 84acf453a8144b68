"""Vocabularies: round trips, special ids, sampling that resumes, files that are damaged."""

import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import transduce
from transduce.config.settings import TokenizerSettings
from transduce.errors import RunFolderError
from transduce.text import subword_regularization as sampling
from transduce.text.special import characters
from transduce.text.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers, load_vocabulary
from transduce.text.training import train_tokenizer, train_tokenizers

KINDS = ("unigram", "bpe", "char")
LINES = [
    f'{who} {does} {what} , {where} ; it&apos;s "{who}" & Straße-{n} .'
    for n, who in enumerate(("a man", "two women", "ein Hund", "die Kinder", "une fille", "猫"))
    for does in ("reads", "schläft", "plays with", "is throwing", "läuft")
    for what in ("the ball", "einen Ball", "books", "ﬁsh @-@ bones")
    for where in ("in the street", "am Strand", "près du lac", "outside")
]
ALPHABET = sorted(set("".join(LINES)))
TOKENIZERS = {
    (kind, rule): train_tokenizer(LINES, TokenizerSettings(kind=kind, normalization=rule), vocab_size=200)
    for kind in KINDS
    for rule in ("nmt_nfkc", "identity")
}


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """The text as SentencePiece splits it."""
    return tokenizer._sp.normalize(characters(text)).replace("▁", " ").removeprefix(" ")


ours = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=map("-".join, TOKENIZERS))


@ours
def test_the_special_ids_are_the_same_everywhere(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "<unk>", "<s>", "</s>"]


@ours
def test_decoding_restores_known_text(tokenizer: Tokenizer) -> None:
    for line, ids in zip(LINES, tokenizer.encode_batch(LINES), strict=True):
        assert ids == tokenizer.encode(line)
        assert min(ids) > EOS and max(ids) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == normalized(tokenizer, line)
        assert "".join(tokenizer.pieces(ids)).replace("▁", " ").strip() == normalized(tokenizer, line)


@ours
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decoding_restores_normalized_text_of_known_characters(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from(ALPHABET), max_size=80))
    assert tokenizer.decode(tokenizer.encode(text)) == normalized(tokenizer, text)


@ours
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_can_be_encoded_and_unknown_characters_become_unk(tokenizer: Tokenizer, text: str) -> None:
    """NUL, lone surrogates, private characters, separators."""
    ids = tokenizer.encode(text)
    assert (UNK in ids) == bool(tokenizer.unknown(text))
    assert all(UNK <= i < tokenizer.vocab_size and i not in (BOS, EOS) for i in ids)
    if UNK not in ids:
        assert tokenizer.decode(ids) == normalized(tokenizer, text)
    assert tokenizer.encode_batch([text, "x"])[0] == ids


def test_identity_normalization_keeps_characters_that_nfkc_replaces() -> None:
    line = "ﬁsh"
    folded, kept = TOKENIZERS["unigram", "nmt_nfkc"], TOKENIZERS["unigram", "identity"]
    assert folded.decode(folded.encode(line)) == "fish"
    assert kept.decode(kept.encode(line)) == line


def test_unknown_parts_are_listed_and_visible_in_decoded_text() -> None:
    tokenizer = TOKENIZERS["unigram", "nmt_nfkc"]
    assert tokenizer.unknown("a man Ω reads Ω ж") == ["Ω", "ж"]
    assert tokenizer.decode(tokenizer.encode("a Ω")) == "a ⁇"
    assert tokenizer.encode("Ω").count(UNK) == 1


def test_special_ids_are_not_decoded_and_special_words_in_text_are_ordinary_text() -> None:
    tokenizer = TOKENIZERS["bpe", "nmt_nfkc"]
    ids = tokenizer.encode("a man reads")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "a man reads"
    assert tokenizer.decode([]) == "" and tokenizer.encode("") == [] and tokenizer.encode("  ") == []
    assert not {PAD, BOS, EOS} & set(tokenizer.encode("<s> </s> <pad> a"))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sampling_depends_only_on_its_arguments(kind: str) -> None:
    tokenizer = TOKENIZERS[kind, "nmt_nfkc"]
    best = tokenizer.encode_batch(LINES)
    one = tokenizer.sample(LINES, amount=0.3, seed=7)
    other = tokenizer.sample(LINES, amount=0.3, seed=8)
    assert tokenizer.sample(LINES, amount=0.3, seed=7) == one != other != best
    assert Tokenizer(tokenizer.model).sample(LINES, amount=0.3, seed=7) == one
    assert [tokenizer.decode(ids) for ids in one] == [normalized(tokenizer, line) for line in LINES]
    assert tokenizer.sample(LINES, amount=0.0, seed=7) == best
    assert tokenizer.encode_batch(LINES) == best


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sampling_is_the_same_in_every_process(kind: str) -> None:
    """The library's own sampling differs between processes, so a resumed run would see other pieces."""
    tokenizer = TOKENIZERS[kind, "nmt_nfkc"]
    lines = LINES[:20]
    path = Path(transduce.__file__).parents[1]
    with tempfile.NamedTemporaryFile() as file:
        file.write(tokenizer.model)
        file.flush()
        code = (
            "import json, sys\nfrom pathlib import Path\nfrom transduce.text.tokenizer import load_vocabulary\n"
            "print(load_vocabulary(Path(sys.argv[1])).sample(json.loads(sys.argv[2]), amount=0.5, seed=7))"
        )
        command = [sys.executable, "-c", code, file.name, json.dumps(lines)]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == tokenizer.sample(lines, amount=0.5, seed=7)


def test_segmentations_are_sampled_with_their_probabilities() -> None:
    """Compared with an enumeration of all segmentations of a word (Kudo 2018, section 3.2)."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=TOKENIZERS["unigram", "nmt_nfkc"].model)
    scores, word = sampling._scores(sp), "\u2581street\u2581reads"
    cuts = [
        [word[a:b] for a, b in itertools.pairwise((0, *places, len(word)))]
        for n in range(len(word))
        for places in itertools.combinations(range(1, len(word)), n)
    ]
    possible = {
        tuple(cut): math.exp(0.2 * sum(scores[p] for p in cut)) for cut in cuts if all(p in scores for p in cut)
    }
    draw, n = random.Random(1), 20_000
    counts = Counter(tuple(sampling._unigram_word(sp)(word, draw)) for _ in range(n))
    assert len(possible) > 3, sorted(scores)
    for cut, weight in possible.items():
        share = weight / sum(possible.values())
        assert abs(counts[cut] / n - share) < 5 * math.sqrt(share * (1 - share) / n)


def test_bpe_without_dropped_merges_equals_the_library() -> None:
    sp = sentencepiece.SentencePieceProcessor(model_proto=TOKENIZERS["bpe", "nmt_nfkc"].model)
    resegmented = sampling.resegmented(sp, LINES[:50], kind="bpe", amount=1e-12, seed=1)
    assert list(resegmented.values()) == sp.encode(LINES[:50], out_type=str)


def test_sampling_from_threads_is_the_same() -> None:
    tokenizer = TOKENIZERS["unigram", "nmt_nfkc"]
    expected = [tokenizer.sample(LINES, amount=1.0, seed=seed) for seed in range(4)]
    found: dict[int, list[list[int]]] = {}

    def work(seed: int) -> None:
        found[seed] = tokenizer.sample(LINES, amount=1.0, seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(4)] == expected


def test_amount_is_the_fraction_of_sentences_or_of_merges() -> None:
    unigram, bpe = TOKENIZERS["unigram", "nmt_nfkc"], TOKENIZERS["bpe", "nmt_nfkc"]
    best = unigram.encode_batch(LINES)
    changed = [
        sum(a != b for a, b in zip(unigram.sample(LINES, amount=amount, seed=1), best, strict=True))
        for amount in (0.1, 0.5, 1.0)
    ]
    assert 0 < changed[0] < 0.2 * len(LINES) < changed[1] < 0.6 * len(LINES) < changed[2]
    lengths = [sum(map(len, bpe.sample(LINES, amount=amount, seed=1))) for amount in (0.0, 0.1, 0.5, 1.0)]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == sum(map(len, TOKENIZERS["char", "nmt_nfkc"].encode_batch(LINES)))  # no merge is left


def test_character_models_have_only_one_segmentation() -> None:
    tokenizer = TOKENIZERS["char", "identity"]
    assert tokenizer.sample(LINES, amount=0.5, seed=1) == tokenizer.encode_batch(LINES)


def test_a_vocabulary_is_unchanged_after_save_and_load(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["bpe", "identity"]
    tokenizer.save(tmp_path / "t.model")
    loaded = load_vocabulary(tmp_path / "t.model")
    assert loaded.model == tokenizer.model and loaded.encode_batch(LINES) == tokenizer.encode_batch(LINES)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"text\n" * 50])
def test_errors_name_a_damaged_or_missing_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage(TOKENIZERS["bpe", "identity"].model))
    with pytest.raises(RunFolderError, match=r"tokenizer\.model is damaged") as caught:
        load_vocabulary(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RunFolderError, match=r"other\.model is missing"):
        load_vocabulary(tmp_path / "other.model")


def test_a_model_with_other_special_ids_is_refused() -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=written, vocab_size=70, minloglevel=2
    )
    with pytest.raises(ValueError, match="its ids of padding"):
        Tokenizer(written.getvalue())


def test_tokenizers_are_saved_joint_or_separate(tmp_path: Path) -> None:
    alone = train_tokenizers(LINES, (), TokenizerSettings(), vocab_size=75)
    alone.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.model"] and Tokenizers.load(tmp_path).joint

    joint = train_tokenizers(LINES[::2], LINES[1::2], TokenizerSettings(), vocab_size=75)
    assert joint.joint and joint.n_src == joint.n_tgt == 75
    joint.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.src.model", "tokenizer.tgt.model"]
    assert Tokenizers.load(tmp_path).joint

    halves = LINES[: len(LINES) // 2], LINES[len(LINES) // 2 :]
    separate = train_tokenizers(*halves, TokenizerSettings(joint=False), vocab_size=60)
    assert not separate.joint and separate.src.model != separate.tgt.model
    separate.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokenizer.src.model", "tokenizer.tgt.model"]
    loaded = Tokenizers.load(tmp_path)
    assert not loaded.joint and loaded.tgt.model == separate.tgt.model

    (tmp_path / "tokenizer.src.model").unlink()
    with pytest.raises(RunFolderError, match=r"tokenizer\.src\.model is missing"):
        Tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.tgt.model").unlink()
    with pytest.raises(RunFolderError, match=r"tokenizer\.model is missing"):
        Tokenizers.load(tmp_path)
