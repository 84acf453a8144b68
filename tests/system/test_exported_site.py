"""The page that computes in the reader's browser: its records equal Python's, and it needs no server."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium.webdriver.common.by import By

import marians
from hard_strings import HARD
from marians import LINES
from system.browsers import MARKS, Browser, logged_problems, wait
from system.commands import succeed, transduce
from text_runs import make_run
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import TokenizerSettings
from transduce.inspection import analyses, inspection
from transduce.inspection.inspected_models import Subject, open_subject
from transduce.inspection.inspection import inspect_sentence
from transduce.inspection.page import read_page_file
from transduce.inspection.site import quantize, site_page, vocabulary_data
from transduce.text.training import train_tokenizer, train_tokenizers

pytestmark = MARKS
ASK = """
const [body, done] = arguments;
const plain = (_, value) =>
  ArrayBuffer.isView(value) ? [...value] : Number.isFinite(value) || typeof value !== "number" ? value : String(value);
const withProducts = (record) => record.parts && {
  ...record,
  parts: record.parts.map((part) => ({
    ...part,
    values: part.values.map((value) => ({ ...value, is_product: value.is_product, product: value.product })),
  })),
};
const answer = await globalThis.inspectedPage.ask("/inspect/look", body);
done(JSON.stringify(withProducts(answer) ?? answer, plain));
"""
ASK = f"(async () => {{{ASK}}})().catch((error) => done(JSON.stringify({{error: String(error)}})))"
MODELS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {
        **{"residual": "pre", "norm": "rms", "positions": "rotary", "feed_forward": "gated", "activation": "gelu"},
        **{"n_kv_heads": 2, "d_key": 6, "d_value": 3, "scale_embeddings": False},
    },
    "learned": {
        **{"positions": "learned", "tie": "none", "output_bias": True, "embedding_norm": True, "one_end": True},
        **{"activation": "silu", "bias": False},
    },
    "gpt": {},
}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "forced": {"prefix": [7, 12]},
    "target": {"target": "two women"},
    "greedy": {"beam": 1, "length_penalty": 0.0},
    "wide": {"beam": 8, "length_penalty": 2.0},
    "head": {"off": ["decoder.blocks.0.self_attention.heads.1"]},
    "network": {"off": ["decoder.blocks.0.feed_forward"]},
    "mask": {"off": ["decoder.mask"]},
    "positions": {"off": ["src_embedding.positions", "tgt_embedding.positions"]},
}


@pytest.fixture(autouse=True)
def whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of Python keep all digits, as those of the page do."""

    def pack(array: Any) -> dict[str, Any]:
        values = array.detach().double().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, dtype="f8")
        return {"shape": list(values.shape), "data": np.where(values < -1e29, -np.inf, values).ravel().tolist()}

    for module in (analyses, inspection):
        monkeypatch.setattr(module, "pack", pack)


def open_page(browser: Browser, subject: Subject, path: Path) -> None:
    """Open the page of a model; the test reaches its requests."""
    page = site_page(subject).replace("else startLive();", "else startLive();\nglobalThis.inspectedPage = page;")
    path.write_text(page, encoding="utf-8")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return Boolean(globalThis.inspectedPage)"))


def ask(browser: Browser, text: str, **asked: Any) -> Any:
    body = {"run": "run", "text": text, "target": None, "prefix": [], "off": [], **asked}
    answer = json.loads(browser.execute_async_script(f"const done = arguments[1]; {ASK}", body))
    assert "error" not in answer, answer
    return answer


def assert_same(page: Any, python: Any, place: str = "") -> None:
    """Compare plain data; numbers agree to 1e-4."""
    if isinstance(python, dict):
        assert set(page) == set(python), place
        for key, value in python.items():
            assert_same(page[key], value, f"{place}.{key}")
    elif isinstance(python, (list, tuple)) and python and isinstance(python[0], (float, int)):
        np.testing.assert_allclose([float(x) for x in page], python, rtol=1e-4, atol=1e-4, err_msg=place)
    elif isinstance(python, (list, tuple)):
        assert len(page) == len(python), place
        for i, value in enumerate(python):
            assert_same(page[i], value, f"{place}[{i}]")
    elif isinstance(python, float):
        assert math.isclose(float(page), python, rel_tol=1e-4, abs_tol=1e-4), (place, page, python)
    else:
        assert page == python, (place, page, python)


@pytest.mark.parametrize("name", MODELS)
def test_records_of_the_page_equal_those_of_python(name: str, browser: Browser, tmp_path: Path) -> None:
    """For each request: all values, all views, and all products."""
    if name == "gpt":
        run = make_run(tmp_path / "run", kind="gpt")
    else:
        run = marians.make_run(
            tmp_path / "run", seed=2, decoding={"max_length": 12}, joint=name != "learned", **MODELS[name]
        )
    subject = open_subject(run, device="cpu")
    open_page(browser, subject, tmp_path / "index.html")
    for case, asked in ASKED.items():
        if name == "gpt" and (case == "positions" or not {"off"} >= set(asked)):
            continue
        for text in (marians.LINES[0], marians.LINES[-1], " ... ") if case == "plain" else marians.LINES[:1]:
            search = {key: asked[key] for key in ("beam", "length_penalty") if key in asked}
            found = inspect_sentence(
                subject,
                text,
                asked.get("target"),
                prefix=asked.get("prefix", ()),
                off=asked.get("off", ()),
                decoding=DecodingOptions(**search) if search else None,
            )
            names = [part.name for part in found.parts]
            python = json.loads(json.dumps(found.to_json(names, weights=names)))
            python["model"]["settings"]["weights"] = "8 bits"
            page = ask(browser, text, **asked)
            page |= ask(browser, text, **asked, views=["saliency", "without"])
            for value in (value for record in (page, python) for part in record["parts"] for value in part["values"]):
                drop_absent(value["product"])
            assert_same(page, python, f"{name} {case} {text}")


COUNT = """
const { exp } = Math;
globalThis.exponentials = 0;
Math.exp = (x) => (globalThis.exponentials++, exp(x));
"""


def test_slow_views_leave_the_thread_of_the_page_free(browser: Browser, tmp_path: Path) -> None:
    """The page itself computes records; its worker has a `Math` of its own."""
    subject = open_subject(marians.make_run(tmp_path / "run", decoding={"max_length": 12}), device="cpu")
    open_page(browser, subject, tmp_path / "index.html")
    browser.execute_script(COUNT)
    ask(browser, LINES[0])
    assert (before := browser.execute_script("return globalThis.exponentials")) > 0
    assert set(ask(browser, LINES[0], views=["saliency", "without"])) == {"saliency", "without"}
    assert browser.execute_script("return globalThis.exponentials") == before
    assert not logged_problems(browser)


def drop_absent(product: dict[str, Any] | None) -> None:
    """Drop the missing operands of a product, which the page has as null."""
    for key in [key for key, value in (product or {}).items() if value is None]:
        del product[key]  # type: ignore[index]


READ = """
const vocabulary = globalThis.openVocabulary(arguments[0]);
return arguments[1].map((text) => {
  const { ids, spans } = vocabulary.encode(text);
  return [ids, spans, vocabulary.decode(ids)];
});
"""
VOCABULARIES: dict[str, dict[str, Any]] = {
    "unigram": {"kind": "unigram", "normalization": "nmt_nfkc"},
    "bpe": {"kind": "bpe", "normalization": "nfkc"},
    "char": {"kind": "char", "normalization": "nfc"},
    "identity": {"kind": "unigram", "normalization": "identity"},
    "exact": {"kind": "bpe", "exact": True},
    "folded": {"kind": "unigram", "normalization": "nmt_nfkc_cf"},
}


@pytest.mark.parametrize("size", [180, 1100])  # without and with pieces for bytes
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_page_reads_and_writes_text_as_sentencepiece(
    name: str, size: int, browser: Browser, tmp_path: Path
) -> None:
    """Every piece, its span, and the text of the pieces, with placeholders; the source cannot read all characters.

    Repeated letters can be split into the same pieces in another order: only rounding decides between these.
    """
    lines = [*LINES, "Straße ½ ﬁ é ǅ don't a--b # @ 漢字 का", "lll aaaa abab &amp; &amp; &amp; x&amp;y"] * 5
    settings = TokenizerSettings(**{"placeholders": 0 if name == "exact" else 8, **VOCABULARIES[name]})
    if name == "exact":
        sides = [train_tokenizer(lines, settings, vocab_size=420)]
    else:
        both = train_tokenizers([*LINES, "ж"], lines, settings, vocab_size=size)
        sides = [both.src, both.tgt]
    modules = (read_page_file(module) for module in ("record.js", "pieces.js"))
    code = re.sub(r"^import [^;]*;\n|^export ", "", "\n".join(modules), flags=re.MULTILINE)
    page = tmp_path / "pieces.html"
    page.write_text(
        f'<meta charset="utf-8"><script>{code}\nglobalThis.openVocabulary = openVocabulary;</script>', "utf-8"
    )
    browser.get(page.as_uri())
    draw = random.Random(1)
    repeated = ["".join(draw.choices([*"aabelllnst  ", "&amp;"], k=40)) for _ in range(300)]
    texts = [*HARD, *lines, *repeated]
    for vocabulary in sides:
        found = browser.execute_script(READ, vocabulary_data(vocabulary), texts)
        for text, (ids, spans, written) in zip(texts, found, strict=True):
            expected, places = vocabulary.encode_with_offsets(text)
            assert ids == expected and [tuple(span) for span in spans] == places, text
            assert written == vocabulary.decode(expected), text


CLICK = "document.querySelector(arguments[0]).click()"


def test_a_reader_changes_the_model_without_a_server(browser: Browser, tmp_path: Path) -> None:
    """From file://: any sentence, a forced token, a head that is off, and a beam of 5, each as Python computes it."""
    run, folder = marians.make_run(tmp_path / "run", seed=2, decoding={"max_length": 12}), tmp_path / "site"
    succeed("inspect", run, "--export-site", folder)
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert "default-src 'none'" in text and "connect-src" not in text
    subject = open_subject(run, device="cpu")
    quantize(subject.model)

    def shown(**asked: Any) -> None:
        """Wait until the page shows the output that Python computes for the request."""
        decoding = DecodingOptions(beam=asked.pop("beam")) if "beam" in asked else None
        found = inspect_sentence(subject, "two women", decoding=decoding, **asked)
        tokens = list(found.sentence.sides["tgt_out"].tokens)
        wait(lambda: browser.execute_script(TOKENS) == tokens)

    browser.get((folder / "index.html").as_uri() + "#mode=lab")
    box = wait(lambda: browser.find_element(By.ID, "text"))
    wait(box.is_displayed)
    box.send_keys("two women")
    shown()
    token = browser.execute_script("return document.querySelectorAll('#output .choice:not([disabled])')[1]")
    forced = int(token.get_attribute("data-key").rpartition("-")[2])
    browser.execute_script("arguments[0].click()", token)
    shown(prefix=[forced])
    browser.execute_script(CLICK, "[data-key=unforce-stage]")
    shown()
    name = "decoder.blocks.0.cross_attention.heads.1"
    browser.execute_script(CLICK, f"[data-key='switch-{name}']")
    shown(off=[name])
    browser.execute_script(CLICK, "[data-key=all-on]")
    shown()
    browser.execute_script(SLIDE, "[data-key=lab-beam]", 5)
    shown(beam=5)
    wait(lambda: len(browser.find_elements(By.CSS_SELECTOR, "#lesson .without li")) > 4)
    assert not logged_problems(browser)


TOKENS = (
    "return [...document.querySelectorAll('#output .column > .token')].map((one) => one.textContent.split(' ◂')[0])"
)
SLIDE = """
const control = document.querySelector(arguments[0]);
control.value = arguments[1];
control.dispatchEvent(new Event("input"));
"""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"positions": "t5"}, ["model.positions = 't5'", "sinusoidal"]),
        ({"encoder_pattern": "local", "window": 3}, ["model.encoder_pattern = 'local'", "full"]),
        ({"kind": "rnn"}, ["model.kind = 'rnn'", "gpt"]),
    ],
)
def test_a_model_that_the_page_cannot_compute_is_refused(
    options: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **{"kind": "transformer", **options})
    done = transduce("inspect", run, "--export-site", tmp_path / "site")
    assert done.code == 2 and done.err.count("\n") == 1 and all(one in done.err for one in named)
    assert not (tmp_path / "site").exists()


def test_a_folder_in_use_and_a_sentence_are_refused(tmp_path: Path) -> None:
    run = marians.make_run(tmp_path / "run")
    done = transduce("inspect", run, "--export-site", run)
    assert done.code == 2 and "exists already" in done.err
    done = transduce("inspect", run, "a man", "--export-site", tmp_path / "site")
    assert done.code == 2 and "TEXT" in done.err
