"""The views of an inspection: every one against an independent computation, for every architecture."""

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import transduce
from text_runs import make_run
from transduce.config.decoding import DecodingOptions
from transduce.data.store import Example
from transduce.decoding.search import beam_search
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError
from transduce.inspection.analyses import gradient_times_input, label_head
from transduce.inspection.inspected_models import Side, Subject, TranslationSubject, open_subject, replay
from transduce.inspection.inspection import Inspection, inspect_sentence
from transduce.inspection.recorded_modules import pack, unpack
from transduce.nn.recording import intervene, switches
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, EOS

pytestmark = pytest.mark.usefixtures("unchecked")

TEXT = "the cat sat on a mat"
RUNS: dict[str, dict[str, Any]] = {
    "paper": {"kind": "transformer"},
    "pre-norm, rotary, gated": {
        "kind": "transformer",
        "residual": "pre",
        "positions": "rotary",
        "feed_forward": "gated",
        "norm": "rms",
    },
    "grouped heads, ALiBi": {"kind": "transformer", "n_kv_heads": 1, "positions": "alibi"},
    "Shaw": {"kind": "transformer", "positions": "shaw"},
    "T5": {"kind": "transformer", "positions": "t5"},
    "SSRU": {"kind": "transformer", "decoder_self": "ssru"},
    "sparse": {"kind": "transformer", "encoder_pattern": "local", "decoder_pattern": "local", "window": 2},
    "star": {"kind": "star"},
    "RNN": {"kind": "rnn"},
    "GRU": {"kind": "rnn", "cell": "gru", "attention": "bahdanau"},
    "ConvS2S": {"kind": "convs2s"},
    "GPT": {"kind": "gpt"},
    "XL": {"kind": "transformer-xl"},
    "XL with segments": {"kind": "transformer-xl", "segment_length": 4, "memory_length": 4, "eval_memory_length": 4},
    "BERT": {"kind": "bert"},
    "BERT classifier": {"kind": "bert-classifier"},
    "star classifier": {"kind": "star-classifier"},
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def open_one(name: str) -> Subject:
        return open_subject(make_run(folder / name.replace(" ", "-"), decoding={"max_length": 24}, **RUNS[name]))

    return open_one


@pytest.fixture(scope="module")
def looks(subjects: Any) -> Any:
    """The inspection of TEXT, by the name of a run."""
    return cache(lambda name: inspect_sentence(subjects(name), TEXT))


def logits_of(subject: Subject, found: Inspection) -> torch.Tensor:
    with torch.no_grad():
        return subject.logits(subject.model, subject.hidden(subject.model, *found.sentence.inputs))[0].double()


@pytest.mark.parametrize("name", RUNS)
def test_probabilities_are_those_of_the_model(name: str, subjects: Any, looks: Any) -> None:
    found = looks(name)
    expected = logits_of(subjects(name), found).softmax(-1)
    shown = found.views["tokens"]
    assert len(shown) == len(expected)
    for row, token in zip(expected, shown, strict=True):
        assert token["probability"] == pytest.approx(float(row[token["id"]]), rel=1e-4)
        assert token["rank"] == 1 + int((row > row[token["id"]]).sum())
    assert found.views["absent"].keys() <= {"heads", "positions", "steps", "layers", "saliency"}
    json.dumps(found.to_json([part.name for part in found.parts]))


@pytest.mark.parametrize("name", RUNS)
def test_every_cell_is_the_dot_product_that_is_written_out(name: str, looks: Any) -> None:
    found = looks(name)
    checked = 0
    for value, array in found.arrays.items():
        index = tuple(n // 2 for n in array.shape)
        one = found.cell(value, index)
        if one is not None:
            terms = np.array(one["terms"])
            result = one["scale"] * (terms[:, 0] * terms[:, 1]).sum() + (one["bias"] or 0.0)
            assert result == pytest.approx(float(array.array[index]), abs=1e-4, rel=1e-3), value
            checked += 1
    assert checked


@pytest.mark.parametrize("name", RUNS)
def test_the_operands_of_a_kept_page_give_its_values(name: str, looks: Any) -> None:
    found = looks(name)
    names = [part.name for part in found.parts]
    values = [value for part in found.to_json(names, weights=names)["parts"] for value in part["values"]]
    arrays = {value["name"]: unpack(value["data"]).astype("f8") for value in values}
    checked = set()
    for value in values:
        product = value["product"]
        assert (product is not None) == value["is_product"]
        if product is None:
            continue
        right = arrays[product["right"]] if "right" in product else unpack(product["weight"]).astype("f8")
        right = right.swapaxes(-1, -2) if product["transposed"] else right
        result = product["scale"] * arrays[product["left"]] @ right
        if product.get("bias"):
            result += np.expand_dims(unpack(product["bias"]).astype("f8"), -2)
        expected = arrays[value["name"]]
        np.testing.assert_allclose(result, expected, atol=0.02 + 2e-3 * np.abs(expected).max())
        checked.add("weight" in product)
    assert True in checked


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_those_of_the_model_for_the_most_probable_tokens(name: str, subjects: Any, looks: Any) -> None:
    found = looks(name)
    expected = logits_of(subjects(name), found)
    shown = list(found.sentence.sides["candidates"].ids)
    np.testing.assert_allclose(found["logits"].array, expected[:, shown], atol=1e-4)
    np.testing.assert_allclose(found["logits.probabilities"].array, expected.softmax(-1)[:, shown], atol=1e-5)
    assert set(expected.topk(min(3, expected.shape[1])).indices.flatten().tolist()) <= set(shown)
    assert set(found.sentence.targets.tolist()) <= set(shown)


@pytest.mark.parametrize("name", RUNS)
def test_weights_and_probabilities_are_the_softmax_of_the_values_that_are_named(name: str, looks: Any) -> None:
    """NumPy, in float64. Of the probabilities of all outputs, a part is shown."""
    inspection, kinds = looks(name), set()
    for part in inspection.to_json()["parts"]:
        for value in part["values"]:
            if not value["softmax"]:
                continue
            scores = sum(inspection[score].array.astype("f8") for score in value["softmax"])
            powers = np.exp(scores - np.max(scores, -1, keepdims=True))
            shown = inspection[value["name"]].array
            share = shown.sum(-1, keepdims=True) if part["kind"] == "logits" else 1.0
            np.testing.assert_allclose(shown, share * powers / powers.sum(-1, keepdims=True), atol=1e-5)
            kinds.add(part["kind"])
    assert "logits" in kinds and (len(kinds) > 1) == bool(inspection.views["attention"])


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("residual", ["pre", "post"])
@pytest.mark.parametrize("kind", ["transformer", "gpt", "bert", "transformer-xl"])
def test_the_input_of_a_sub_layer_is_what_its_title_says(kind: str, residual: str, norm: str, tmp_path: Any) -> None:
    """The norms in NumPy: pre-norm is a part of its own between the stream and the sub-layer."""
    run = make_run(tmp_path / "run", kind=kind, residual=residual, norm=norm, activation="gelu")
    inspection = inspect_sentence(open_subject(run), TEXT)
    parts = {part.name: part for part in inspection.parts}
    names, written = list(parts), "LayerNorm" if norm == "layer" else "RMSNorm"
    sublayers = [name for name in names if f"{name}_residual" in parts]
    assert len(sublayers) >= 4
    for name in sublayers:
        part, connection, place = parts[name], parts[f"{name}_residual"], names.index(name)
        stream, read = (inspection[f"{one.name}.input"] for one in (connection, part))
        assert names[place + 1] == connection.name and stream.title == "x, the input"
        if residual == "post":
            expected = stream.array
            assert read.title == "x, the input" and connection.kind.equation == f"{written}(x + Sublayer(x))"
        else:
            layer = connection.module.norm
            centred = stream.array - (stream.array.mean(-1, keepdims=True) if norm == "layer" else 0)
            expected = (
                centred / np.sqrt((centred**2).mean(-1, keepdims=True) + layer.eps) * layer.weight.detach().numpy()
            )
            expected += layer.bias.detach().numpy() if norm == "layer" else 0
            assert read.title == f"{written}(x), the input"
            assert connection.kind.equation == f"x + Sublayer({written}(x))"
            assert names[place - 1] == f"{connection.name}.norm" and parts[names[place - 1]].kind.kind == "norm"
        np.testing.assert_allclose(read.array, expected, atol=1e-4)
    state = {"pre": f"gelu({written}(x) W₁ + b₁) W₂ + b₂", "post": "gelu(x W₁ + b₁) W₂ + b₂"}
    assert parts[next(name for name in sublayers if "feed_forward" in name)].kind.equation == state[residual]
    hidden = "norm(x)" if residual == "pre" else "x"
    assert inspection.views["lens"]["hidden"] == (f"head({hidden})" if kind == "bert" else hidden)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "XL with segments"])  # whose memory has no gradient
def test_the_gradient_view_sums_to_a_directional_derivative(name: str, subjects: Any) -> None:
    """Sum of gradient x input = d/ds log p at s = 1 of the embeddings times s, by finite differences in float64."""
    subject = copy.copy(subjects(name))
    subject.model = copy.deepcopy(subject.model).double()
    target = "a mat" if isinstance(subject, TranslationSubject) else None  # random weights write long ones
    sentence = subject.read(subject.model, TEXT, target, ())
    shown = gradient_times_input(subject, subject.model, sentence).sum(1)

    def log_probs(scale: float) -> torch.Tensor:
        with torch.no_grad(), intervene(subject.model, {subject.embedding: lambda x: x * scale}):
            hidden = subject.hidden(subject.model, *sentence.inputs)
            rows = subject.logits(subject.model, hidden)[0].log_softmax(-1)
        return rows[torch.arange(len(sentence.targets)), sentence.targets]

    step = 1e-6
    expected = (log_probs(1 + step) - log_probs(1 - step)) / (2 * step)
    np.testing.assert_allclose(shown, expected.numpy(), atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(
    "name", [name for name, options in RUNS.items() if options["kind"] in ("transformer", "rnn", "star", "convs2s")]
)
def test_leaving_words_out_is_the_score_of_the_shorter_source(name: str, subjects: Any) -> None:
    subject = subjects(name)
    found = inspect_sentence(subject, TEXT, "a mat")
    side, targets = found.sentence.sides["src"], found.sentence.targets.tolist()[:-1]
    shown = unpack(found.views["saliency"][1]["values"])
    translator = Translator.load(subject.folder.path)
    for word in (0, 2):
        shorter = [i for i, owner in zip(side.ids, side.words, strict=True) if owner != word][:-1]
        pairs = [Example(list(side.ids)[:-1], targets), Example(shorter, targets)]
        whole, without = (np.array(row) for row in translator.engine.score(pairs))
        column = side.words.index(word)
        np.testing.assert_allclose(shown[:, column], whole - without, atol=5e-3, rtol=2e-3)


def test_the_tree_is_the_search(subjects: Any) -> None:
    subject = subjects("paper")
    assert isinstance(subject, TranslationSubject)
    for beam, penalty in ((1, 1.0), (4, 0.6), (6, 0.0)):
        options = DecodingOptions(beam=beam, length_penalty=penalty, n_best=beam).over(subject.settings)
        _, src, _ = subject.source(TEXT)
        (expected,) = beam_search(subject.model, src, options, max_length=12)
        found = replay(subject.model, src, options, limit=12)
        assert found.results == expected
        nodes = {node.id: node for step in found.steps for node in step}
        for one, end in zip(expected, found.ends, strict=True):
            assert nodes[end].log_prob == pytest.approx(one.log_prob)
            tokens, node = [], nodes[end]
            while True:
                tokens.append(node.token)
                if not node.parent:
                    break
                parent = nodes[node.parent]
                # A hypothesis is the log-probability of its parent and of the token that the parent offered.
                offered = dict(parent.top).get(node.token)
                if offered is not None:
                    assert node.log_prob == pytest.approx(parent.log_prob + np.log(offered), abs=1e-4)
                node = parent
            assert tuple(reversed(tokens))[: len(one.ids)] == one.ids


def test_the_tree_is_the_search_where_hypotheses_are_equally_probable(subjects: Any) -> None:
    subject = copy.copy(subjects("paper"))
    subject.model = copy.deepcopy(subject.model)
    bias = torch.full((subject.tokenizers.n_tgt,), -9.0)
    bias[[EOS, *range(20, 26)]] = 0.0
    subject.model.output_bias = torch.nn.Parameter(bias)
    with torch.no_grad():
        subject.model.output_weight.zero_()
    options = DecodingOptions(beam=16, n_best=16, length_penalty=3.0)
    found = replay(subject.model, subject.source(TEXT)[1], options, limit=6)
    assert len(found.ends) == len(found.results) == 16


def test_forcing_the_chosen_tokens_gives_the_translation(subjects: Any) -> None:
    subject = copy.copy(subjects("paper"))
    subject.settings = subject.settings.model_copy(update={"beam": 1})
    whole = inspect_sentence(subject, TEXT)
    ids = whole.sentence.sides["tgt_out"].ids[:-1]
    for n in range(min(len(ids), 6)):
        assert inspect_sentence(subject, TEXT, prefix=ids[:n]).sentence.sides["tgt_out"].ids[:-1] == ids
    other = 20 if ids[0] != 20 else 21
    assert inspect_sentence(subject, TEXT, prefix=[other]).sentence.sides["tgt_out"].ids[0] == other


def test_a_translator_is_looked_into_as_its_run_is(subjects: Any) -> None:
    subject = subjects("paper")
    expected, path = inspect_sentence(subject, TEXT), subject.folder.path
    translator = Translator.load(path, device="cpu")
    for found in (transduce.inspect(model, TEXT) for model in (path, str(path), translator)):
        assert found.views["tokens"] == expected.views["tokens"] and found.views["steps"] == expected.views["steps"]
    off = list(switches(subject.model))[:1]
    assert transduce.inspect(translator, TEXT, "a mat", off=off).views["off"] == off


def test_a_given_translation_is_scored_as_it_is(subjects: Any) -> None:
    subject = subjects("paper")
    found = inspect_sentence(subject, TEXT, "a mat")
    expected = Translator.load(subject.folder.path).score([TEXT], ["a mat"])[0].token_log_probs
    shown = [np.log(token["probability"]) for token in found.views["tokens"]]
    np.testing.assert_allclose(shown, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["paper", "GPT", "BERT", "star", "RNN"])
def test_what_is_switched_off_is_said_and_leaves_the_model_alone(name: str, subjects: Any) -> None:
    subject = subjects(name)
    before = inspect_sentence(subject, TEXT)
    for switch in list(switches(subject.model))[:4]:
        changed = inspect_sentence(subject, TEXT, off=[switch])
        assert changed.views["off"] == [switch] and changed.views["original"] is not None
    after = inspect_sentence(subject, TEXT)
    assert after.views["tokens"] == before.views["tokens"]
    assert all(np.array_equal(after[key].array, before[key].array) for key in before.arrays)


@pytest.mark.parametrize("name", ["paper", "GPT", "BERT"])
def test_the_output_without_parts_is_that_of_a_model_with_the_parts_off(name: str, subjects: Any) -> None:
    subject = subjects(name)
    found = inspect_sentence(subject, TEXT)
    target = found.views["sides"][subject.predicted]["text"] if subject.reads_pairs else None
    assert found.views["without"]
    for row in found.views["without"]:
        given = inspect_sentence(subject, TEXT, target, off=row["off"])
        log_prob = sum(np.log(token["probability"]) for token in given.views["tokens"])
        assert row["log_prob"] == pytest.approx(log_prob, abs=1e-3)
        own = inspect_sentence(subject, TEXT, off=row["off"])
        assert row["text"] == own.sentence.sides[subject.predicted].text


def test_options_of_the_search_are_those_of_the_replay(subjects: Any) -> None:
    subject = subjects("paper")
    found = inspect_sentence(subject, TEXT, decoding=DecodingOptions(beam=3, length_penalty=0.5))
    steps = found.views["steps"]
    assert (steps["beam"], steps["length_penalty"], len(steps["results"])) == (3, 0.5, 3)
    assert transduce.inspect(subject.folder.path, TEXT, beam=3, length_penalty=0.5).views["steps"] == steps
    with pytest.raises(SettingsError, match="beam: this model has no search"):
        inspect_sentence(subjects("GPT"), TEXT, decoding=DecodingOptions(beam=3))


def test_every_line_of_code_is_in_the_function_that_computes_it(looks: Any) -> None:
    """The line that the page marks is in the source that it shows."""
    marked = set()
    for part in looks("paper").parts:
        for name in part.values:
            if part.point(name).line is not None:
                line = part.line(name)
                assert line is not None and part.point(name).line[1] in line[0]["code"].split("\n")[line[1]]
                marked.add(name.removeprefix(part.name))
    assert {".query", ".scores", ".weights", ".heads", ".expand", ".table", ".norm.input"} <= marked


def test_the_last_layer_of_the_lens_is_the_prediction(looks: Any) -> None:
    for name in ("paper", "pre-norm, rotary, gated", "GPT", "BERT", "star"):
        found = looks(name)
        last = unpack(found.views["lens"]["layers"][-1]["probability"])
        np.testing.assert_allclose(last, [token["probability"] for token in found.views["tokens"]], atol=1e-3)


def test_words_join_the_tokens_of_a_side(looks: Any) -> None:
    sides = looks("paper").sentence.sides
    for side in sides.values():
        assert len(side.words) == len(side.tokens) and side.words[0] == 0
        assert all(later - earlier in (0, 1) for earlier, later in zip(side.words, side.words[1:], strict=False))
    assert sides["src"].word_texts == (*TEXT.split(), "</s>") and max(sides["src"].words) == len(TEXT.split())


def test_texts_of_words_lack_the_marks_of_a_tokenizer() -> None:
    library = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[SEP]": 1, "[CLS]": 2, "ein": 3, "##e": 4, ".": 5}
    wordpiece = library.Tokenizer(library.models.WordPiece(words, unk_token="[UNK]"))
    wordpiece.pre_tokenizer, wordpiece.decoder = library.pre_tokenizers.BertPreTokenizer(), library.decoders.WordPiece()
    letters = {letter: i for i, letter in enumerate(["<|e|>", *sorted(library.pre_tokenizers.ByteLevel.alphabet())])}
    by_bytes = library.Tokenizer(library.models.BPE(letters, []))
    by_bytes.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = library.decoders.ByteLevel()
    for model, theirs, text, expected in (
        (wordpiece, [-1, 0, 2, 1, 3, 4, 5], "eine eine.", ["eine", "eine", "."]),
        (by_bytes, [-1, -1, 0, 0, *range(1, 257)], "så så", ["så", "så"]),
    ):
        vocabulary = HubTokenizer(model.to_str().encode(), theirs)
        side = Side.of(vocabulary, [BOS, *vocabulary.encode(text), EOS], text)
        begin, *inside, end = side.word_texts
        assert inside == expected and [begin, end] == vocabulary.pieces([BOS, EOS])


def test_too_much_and_nothing_are_refused(subjects: Any) -> None:
    with pytest.raises(DataError, match="at most 256"):
        inspect_sentence(subjects("paper"), "cat " * 300)
    with pytest.raises(DataError, match="one text"):
        inspect_sentence(subjects("GPT"), TEXT, "b")
    with pytest.raises(SettingsError, match="cannot be switched off"):
        inspect_sentence(subjects("paper"), TEXT, off=["decoder"])
    with pytest.raises(DataError, match="text is empty"):
        inspect_sentence(subjects("BERT"), "")
    assert inspect_sentence(subjects("paper"), "").views["tokens"]
    with pytest.raises(SettingsError, match="beam: no effect on task 'causal'"):
        open_subject(subjects("GPT").folder.path, decoding=DecodingOptions(beam=2))


@pytest.mark.parametrize("prefix", [[10**6], [-1], [20] * 300])
def test_odd_prefixes_are_refused(subjects: Any, prefix: list[int]) -> None:
    with pytest.raises(DataError, match="prefix: at most"):
        inspect_sentence(subjects("paper"), TEXT, prefix=prefix)


def test_a_translation_is_as_long_as_the_translator_s(subjects: Any) -> None:
    subject = copy.copy(subjects("paper"))
    translator = Translator.load(subject.folder.path, device="cpu")
    for most in (3, 250):
        subject.settings = translator.settings = subject.settings.model_copy(update={"max_length": most, "beam": 1})
        ids = inspect_sentence(subject, TEXT).sentence.sides["tgt_out"].ids
        (expected,) = translator.translate([TEXT])
        assert ids[: len(expected.ids)] == expected.ids and len(ids) == len(expected.ids) + 1


def test_parts_of_a_decoder_are_named_by_what_they_read(subjects: Any) -> None:
    found = inspect_sentence(subjects("paper"), TEXT, "a mat")
    sides = found.sentence.sides
    assert found["tgt_embedding"].rows == "tgt_in" and sides["tgt_in"].tokens[0] != sides["tgt_out"].tokens[0]
    for view in found.views["attention"]:
        rows, columns = (sides[view[name]].tokens for name in ("rows", "columns"))
        assert tuple(view["row_tokens"]) == rows and tuple(view["column_tokens"]) == columns
        assert view["kind"] == "cross" or view["rows"] == view["columns"]


def test_the_first_step_offers_the_ten_best_tokens(subjects: Any) -> None:
    subject = subjects("paper")
    for prefix in ([], [20]):
        found = inspect_sentence(subject, TEXT, prefix=prefix)
        expected = logits_of(subject, found)[0].softmax(-1).topk(10)
        shown = found.views["steps"]["top"]
        assert [token for _, token, _ in shown] == expected.indices.tolist()
        assert [p for *_, p in shown] == pytest.approx(expected.values.tolist(), rel=1e-4)


def test_heads_are_labelled_by_their_rules() -> None:
    """By hand: the rows of a causal head with even weights, heads on one token, and one that fits no rule."""
    side = Side("a b c.", (5, 6, 7, 8), ("a", "b", "c", "."), (0, 1, 2, 3))
    even = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    label = label_head(even, side, is_cross=False)
    assert (label["label"], label["score"]) == ("broad", pytest.approx(1.0))
    before = np.eye(4, k=-1) * 0.9 + 0.1 / 4
    before[0] = 0.25
    label = label_head(before, side, is_cross=False)
    assert (label["label"], label["score"]) == ("previous token", pytest.approx(3 * 0.925 / 4))
    two_away = 0.1 + 0.6 * np.eye(4)[[2, 3, 0, 1]]
    two_away[0] = [0.4, 0, 0.6, 0]
    label = label_head(two_away, side, is_cross=False)
    assert (label["label"], label["score"]) == ("mixed", None)
    assert label["shares"] == [["“a”", pytest.approx(1.3 / 4)], ["separator", pytest.approx(0.9 / 4)]]


@pytest.mark.parametrize("name", RUNS)
def test_shares_of_heads_are_sums_over_queries_and_keys(name: str, looks: Any) -> None:
    """Added up one weight at a time, in float64."""
    found = looks(name)
    for view in found.views["attention"]:
        tokens, is_cross = view["column_tokens"], view["kind"] in ("cross", "relay")
        for head, label in zip(found[f"{view['name']}.weights"].array, view["labels"], strict=True):
            expected = dict.fromkeys(("separator",) if is_cross else ("separator", *OFFSETS), 0.0)
            read = [0.0] * len(tokens)
            for (query, key), weight in np.ndenumerate(head.astype("f8") / len(head)):
                read[key] += weight
                for relation in expected:
                    if (key - query == OFFSETS[relation]) if relation in OFFSETS else is_separator(tokens[key]):
                        expected[relation] += weight
            best = int(np.argmax(read))
            if not is_separator(tokens[best]):
                expected[f"“{tokens[best]}”"] = read[best]
            largest = sorted(expected.values(), reverse=True)[:2]
            assert [share for _, share in label["shares"]] == pytest.approx(largest, abs=1e-5)
            assert all(share == pytest.approx(expected[name], abs=1e-5) for name, share in label["shares"])
            if label["label"] in expected:
                assert label["score"] == pytest.approx(expected[label["label"]], abs=1e-5) and label["score"] >= 0.4
            if label["label"] == "mixed":
                assert max(expected[one] for one in expected if not one.startswith("“")) < 0.4


OFFSETS = {"previous token": -1, "same token": 0, "next token": 1}


def is_separator(token: str) -> bool:
    return token.startswith("<") or not any(c.isalnum() for c in token)


def test_arrays_survive_their_json() -> None:
    values = np.random.default_rng(1).normal(size=(2, 3, 4)).astype("f4")
    np.testing.assert_allclose(unpack(pack(values)), values, rtol=1e-3)
    values[0, 0, 0] = 1e6
    np.testing.assert_array_equal(unpack(pack(values)), values)
    np.testing.assert_array_equal(unpack(pack(np.array([True, False]))), [1, 0])
