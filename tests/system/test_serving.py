"""`transduce serve`: a real server on loopback, with the clients that people use."""

import io
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import marians
from servers import Server
from system.commands import transduce
from transduce import DecodingOptions, Translator
from transduce.logging import escape

pytestmark = pytest.mark.loopback
LINES = marians.LINES[:12]
LONG = "long " * 100


@pytest.fixture(scope="module")
def server(toy: Path) -> Iterator[Server]:
    server = Server(f"en-de={toy}")
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line or LINES[0][:20] in line for line in server.log)


@pytest.fixture(scope="module")
def short_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model that takes 63 tokens."""
    path = marians.make_run(tmp_path_factory.mktemp("runs") / "short", positions="learned", max_positions=64)
    server = Server(f"en-de={path}")
    yield server
    assert server.stop() == 0


def test_our_protocol(server: Server, translator: Translator) -> None:
    options = DecodingOptions(beam=3, n_best=3)
    expected = translator.translate(LINES, options)
    body = {"text": LINES, "source": "en", "target": "de", "beam": 3, "n_best": 3, "split": False}
    status, answer = server.request("/v1/translate", body)
    assert status == 200 and [one["text"] for one in answer["translations"]] == [one.text for one in expected]
    (sentence,) = answer["translations"][0]["sentences"]
    assert [c["score"] for c in sentence["candidates"]] == pytest.approx([c.score for c in expected[0].candidates])
    assert server.request("/v1/directions")[1] == {
        "models": [{"model": "toy", "source": "en", "target": "de"}],
        "language_models": [],
    }


def test_alignment_and_words(server: Server, translator: Translator) -> None:
    body = {"text": LINES[:2], "alignment": True, "words": True, "split": False}
    for source, one in zip(LINES, server.request("/v1/translate", body)[1]["translations"], strict=False):
        (sentence,) = one["sentences"]
        assert sentence["alignment"] == [list(link) for link in translator.align([source], [one["text"]])[0]]
        assert [word for word, _ in sentence["words"]] == one["text"].split()


def test_documents(server: Server) -> None:
    import deepl

    html = f"<p>{LINES[0]} <b>{LINES[1]}</b></p><script>a < b</script>"
    for path, body, text in (
        ("/v1/translate", {"text": html, "format": "html"}, lambda answer: answer["translations"][0]["text"]),
        ("/translate", {"q": html, "source": "en", "target": "de", "format": "html", "alternatives": 2},
         lambda answer: answer["translatedText"]),
    ):  # fmt: skip
        status, answer = server.request(path, body)
        assert status == 200 and re.fullmatch(r"<p>.*<b>.*</b>.*</p><script>a < b</script>", text(answer))
    answer = server.request("/v1/translate", {"text": "a man {x} reads", "protect": True})[1]
    assert answer["translations"][0]["text"].count("{x}") == 1
    for protect in ("numbers", ["numbers", "urls"]):
        answer = server.request("/v1/translate", {"text": "a man 1,000.5 reads", "protect": protect})[1]
        assert answer["translations"][0]["text"].count("1,000.5") == 1
    client = deepl.DeepLClient("no key is needed", server_url=server.url)
    xml = f"<d><t>{LINES[0]}</t><k>two  women</k><s>{LINES[1]} <i>a man</i></s></d>"
    found = client.translate_text(xml, target_lang="DE", tag_handling="xml", ignore_tags=["k"], outline_detection=False,
                                  splitting_tags=["t", "s", "d", "k"])  # fmt: skip
    assert re.fullmatch(r"<d><t>.*</t><k>two  women</k><s>.*<i>.*</i>.*</s></d>", found.text)
    with pytest.raises(deepl.DeepLException, match="not well-formed XML"):
        client.translate_text("<a>b", source_lang="EN", target_lang="DE", tag_handling="xml")
    assert server.request("/v1/translate", {"text": "a", "format": "html", "words": True})[0] == 400


def test_glossaries(server: Server) -> None:
    import deepl

    client = deepl.DeepLClient("no key is needed", server_url=server.url)
    entries = {"reads": "LIEST", "two women": "ZWEI Frauen & Co"}
    made = client.create_glossary("mine", "EN", "DE", entries)
    assert made.ready and made.entry_count == 2 and made.source_lang == "EN"
    assert [one.glossary_id for one in client.list_glossaries()] == [made.glossary_id]
    assert client.get_glossary(made.glossary_id).name == "mine" and client.get_glossary_entries(made) == entries
    assert [pair.target_lang for pair in client.get_glossary_languages()] == ["de"]
    found = client.translate_text("two women reads", source_lang="EN", target_lang="DE", glossary=made)
    assert found.text.count("LIEST") == found.text.count("ZWEI Frauen & Co") == 1
    tagged = client.translate_text(
        "<b>two women</b> b", source_lang="EN", target_lang="DE", glossary=made, tag_handling="xml"
    )
    assert "ZWEI Frauen &amp; Co" in tagged.text
    table = client.create_glossary_from_csv("table", "EN", "DE", 'a,"b, c"\nd,e')
    assert client.get_glossary_entries(table) == {"a": "b, c", "d": "e"}
    for one in (made, table):
        client.delete_glossary(one)
    for gone in (client.delete_glossary, client.get_glossary):
        with pytest.raises(deepl.GlossaryNotFoundException):
            gone(made.glossary_id)  # type: ignore[operator]
    body = {"text": "a", "source_lang": "EN", "target_lang": "DE", "glossary_id": made.glossary_id}
    assert server.request("/v2/translate", body)[0] == 404
    bad = {"name": "x", "source_lang": "EN", "target_lang": "DE", "entries": "a\tb\na\tc"}
    assert "line 2: a term twice" in server.request("/v2/glossaries", bad)[1]["message"]


def test_libretranslate_client(server: Server, translator: Translator) -> None:
    from libretranslatepy import LibreTranslateAPI

    client, expected = LibreTranslateAPI(server.url + "/"), translator.translate(LINES[:1])[0].text
    assert client.translate(LINES[0], "en", "de") == expected
    assert client.languages()[0] == {"code": "en", "name": "English", "targets": ["de"]}
    assert client.detect("Hello")[0]["language"] == "en"
    form = f"q={LINES[0]}&source=auto&target=de&alternatives=2".encode()
    answer = server.request("/translate", form, **{"Content-Type": "application/x-www-form-urlencoded"})[1]
    assert answer["translatedText"] == expected and answer["detectedLanguage"]["language"] == "en"
    assert 1 <= len(answer["alternatives"]) <= 2
    texts = [one.text for one in translator.translate(LINES)]
    assert server.request("/translate", {"q": LINES, "source": "en", "target": "de"})[1]["translatedText"] == texts
    assert server.request("/frontend/settings")[1]["charLimit"] == 20_000


def test_texts_in_other_languages_stay_as_they_are(server: Server, translator: Translator) -> None:
    import deepl
    from libretranslatepy import LibreTranslateAPI

    client, expected = LibreTranslateAPI(server.url + "/"), translator.translate(LINES[:1])[0].text
    texts = [LINES[0], "Der alte Arzt schläft.", "Le vieux médecin dort.", "123", "😀", "<b>Bonjour le monde</b>"]
    languages = ["en", "de", "fr", None, None, "fr"]
    deepl_client = deepl.DeepLClient("no key is needed", server_url=server.url)
    for text, language in zip(texts, languages, strict=True):
        right = expected if language == "en" else text
        assert client.translate(text, "auto", "de") == right
        for form in ("text", "html"):
            body = {"q": text, "source": "auto", "target": "de", "format": form, "alternatives": 1}
            answer = server.request("/translate", body)[1]
            guess = answer["detectedLanguage"]
            assert answer["translatedText"] == right and (answer["alternatives"] == [] or language == "en")
            assert type(guess["confidence"]) is int and (guess["confidence"] > 0) == (language is not None)
            assert language in (None, guess["language"])
            assert language in ("en", None) or f"detected as '{language}'" in answer["note"]
        (best, *_), found = client.detect(text), deepl_client.translate_text(text, target_lang="DE")
        assert language in (None, best["language"]) and (best["confidence"] > 0) == (language is not None)
        assert found.text == right
        assert language is None or found.detected_source_lang == language.upper()
    answer = server.request("/translate", {"q": texts, "source": "auto", "target": "de"})[1]
    assert answer["translatedText"] == [expected, *texts[1:]]
    assert [guess["language"] for guess in answer["detectedLanguage"] if guess["confidence"]] == [
        "en",
        "de",
        "fr",
        "fr",
    ]


def test_an_untranslated_text_of_several_languages_has_a_note(server: Server) -> None:
    mixed = "Der alte Arzt schläft heute in seinem Haus. The dog runs."
    answer = server.request("/translate", {"q": [mixed, "123"], "source": "auto", "target": "de"})[1]
    assert answer["translatedText"] == [mixed, "123"] and answer["note"][1] == ""
    assert "not translated: detected as 'de'" in answer["note"][0]
    answer = server.request("/v2/translate", {"text": [mixed], "target_lang": "DE"})[1]
    assert "name the source language" in answer["translations"][0]["note"]


def test_forms_and_empty_fields(server: Server, translator: Translator) -> None:
    import requests

    expected = translator.translate(LINES[:1])[0].text
    fields = {"q": LINES[0], "source": "en", "target": "DE"}
    for empty in ({}, {"format": "", "alternatives": ""}, {"format": "html", "alternatives": "2", "api_key": ""}):
        form = {name: (None, value) for name, value in (fields | empty).items()}
        answer = requests.post(f"{server.url}/translate", files=form, timeout=30)
        assert answer.status_code == 200 and answer.json()["translatedText"] == expected
    for body in (fields | {"format": None, "alternatives": None}, fields | {"format": "", "alternatives": ""}):
        status, plain = server.request("/translate", body)
        assert status == 200 and plain["translatedText"] == expected and "alternatives" not in plain
    detected = requests.post(f"{server.url}/detect", files={"q": (None, "Grüße aus\r\nKöln")}, timeout=30).json()
    assert detected[0]["language"] == "de"
    many = requests.post(f"{server.url}/detect", files=[("q", (None, "a"))] * 1001, timeout=30)
    assert many.status_code == 400 and "1,000 fields" in many.json()["error"]
    status, answer = server.request("/detect", b"--x", **{"Content-Type": "multipart/form-data; boundary=y"})
    assert status == 400 and "damaged" in answer["error"]


def test_alternatives_are_different_texts(server: Server) -> None:
    for text in (LINES[0], f"{LINES[0]}\n{LINES[1]}"):
        answer = server.request("/translate", {"q": text, "source": "en", "target": "de", "alternatives": 8})[1]
        assert len({answer["translatedText"], *answer["alternatives"]}) == 1 + len(answer["alternatives"]) > 1
    sentences = server.request("/v1/translate", {"text": LINES, "n_best": 8})[1]["translations"]
    lists = [[one["text"] for one in sentence["candidates"]] for text in sentences for sentence in text["sentences"]]
    assert all(len({*texts}) == len(texts) for texts in lists)


def test_deepl_client(server: Server, translator: Translator) -> None:
    import deepl

    client = deepl.DeepLClient("no key is needed", server_url=server.url)
    expected = [one.text for one in translator.translate(LINES)]
    found = client.translate_text(LINES, source_lang="EN", target_lang="DE")
    assert [one.text for one in found] == expected
    assert found[0].detected_source_lang == "EN" and found[0].billed_characters == len(LINES[0])
    one = client.translate_text(LINES[0], target_lang="de-AT", split_sentences="0", formality="prefer_more")
    assert one.text == expected[0]
    text = f"1. {LINES[0]} ({LINES[1]})\r\n\n- {LINES[2]}"
    for split in ("0", "1", "nonewlines"):
        one = client.translate_text(text, target_lang="DE", split_sentences=split)
        assert one.text == translator.translate([text])[0].text
        assert one.text.startswith("1. ") and "\r\n\n- " in one.text
    assert [language.code for language in client.get_source_languages()] == ["EN"]
    assert [language.code for language in client.get_target_languages()] == ["DE"]
    usage = client.get_usage().character
    assert usage.valid and usage.count is not None and usage.count >= sum(map(len, LINES))
    with pytest.raises(deepl.DeepLException, match="available: en-de"):
        client.translate_text("a", target_lang="FR")
    with pytest.raises(deepl.DeepLException, match="POST /v2/write/rephrase: not found"):
        client.rephrase_text("a dog")
    with pytest.raises(deepl.DeepLException, match="GET /v3/glossaries: not found"):
        client.list_multilingual_glossaries()
    with pytest.raises(deepl.DeepLException, match="POST /v2/document: not found"):
        client.translate_document(io.BytesIO(b"a dog"), io.BytesIO(), target_lang="DE", filename="a.txt")


def test_huggingface_client(server: Server, translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", {})  # else it is fetched from the Hub for the User-Agent header
    found = InferenceClient(model=server.url).translation(LINES[0])
    assert found.translation_text == translator.translate(LINES[:1])[0].text


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/translate", {}, 400, "text: Field required"),
        ("/v1/translate", {"text": "a", "beam": 10**30}, 400, "beam"),
        ("/v1/translate", {"text": "a", "beam": 17}, 400, "at most 16"),
        ("/v1/translate", {"text": "a", "protect": ["numbrs"]}, 400, "'mentions', 'placeholders' or 'numbers'"),
        ("/v1/translate", {"text": "a", "source": "xx"}, 400, "available: en-de"),
        ("/v1/translate", {"text": "a", "model": "x" * 100_000}, 400, "model 'xxx"),
        ("/v1/translate", {"text": "a", "prefix": []}, 400, "0 prefixes"),
        ("/v1/translate", {"text": "a", "prefix": "a" * 20_001}, 400, "20,001 characters"),
        ("/v2/languages?type=foo", None, 400, "type"),
        ("/v1/translate", {"text": ["a"] * 129}, 400, "129 texts"),
        ("/v1/translate", {"text": "a" * 20_001}, 400, "20,001 characters"),
        ("/v1/translate", b"{", 400, "JSON"),
        ("/v1/translate", b"[" * 100_000, 400, "JSON"),
        ("/v1/translate", b'{"text": "\\ud800"}', 400, "JSON"),
        ("/v1/translate", b"\xff\xfe", 400, ""),
        ("/translate", {"q": "a", "source": "de", "target": "en"}, 400, "available: en-de"),
        ("/translate", b" " * ((1 << 20) + 1), 413, "1,048,576 bytes"),
        ("/nothing", {}, 404, "not found"),
        ("/ready", {}, 405, "use GET"),
        ("/models/tiny", None, 405, "use POST"),
        ("/v2/glossaries/abc", {}, 405, "use DELETE, GET"),
    ],
)
def test_bad_requests_get_one_line(server: Server, path: str, body: Any, status: int, message: str) -> None:
    found, answer = server.request(path, body)
    line = answer.get("error") or answer["message"]
    assert found == status and message in line and "\n" not in line and len(line) < 1010


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/translate", {"text": LONG}),
        ("/v1/translate", {"text": LONG, "split": False}),
        ("/v1/translate", {"text": f"<p>{LONG}</p>", "format": "html"}),
        ("/translate", {"q": [LINES[0], LONG], "source": "en", "target": "de"}),
        ("/v2/translate", {"text": [LINES[0], LONG], "source_lang": "EN", "target_lang": "DE"}),
        (
            "/v2/translate",
            {"text": [f"<p>{LONG}</p>"], "source_lang": "EN", "target_lang": "DE", "tag_handling": "xml"},
        ),
        ("/", {"inputs": LONG}),
        ("/v1/chat/completions", {"model": "en-de", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"model": "en-de", "messages": [{"role": "user", "content": LONG}], "stream": True}),
    ],
)
def test_a_sentence_that_is_too_long_for_the_model_is_an_error(short_server: Server, path: str, body: Any) -> None:
    status, answer = short_server.request(path, body)
    message = answer.get("message") or answer["error"]
    line = message["message"] if isinstance(message, dict) else message
    assert status == 400 and re.search(r"^'long long .*': .* tokens; this model takes at most 63; cut it", line)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/translate", {"text": "a" * 50}),
        ("/v1/translate", {"text": "a" * 50, "protect": True}),
        ("/translate", {"q": "a" * 50, "target": "de"}),
        ("/v2/translate", {"text": "a" * 50, "target_lang": "DE"}),
        ("/", {"inputs": "a" * 50}),
        ("/v1/chat/completions", {"model": "en-de", "messages": [{"role": "user", "content": "a" * 50}]}),
    ],
)
def test_a_header_shortens_the_deadline_of_all_protocols(server: Server, path: str, body: Any) -> None:
    assert server.request(path, body, **{"X-Request-Timeout": "1e-6"})[0] == 504
    assert server.request(path, body, **{"X-Request-Timeout": "soon"})[0] == 400


def test_metrics(server: Server) -> None:
    def counts() -> dict[str, float]:
        with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(n) for name, n in (line.rsplit(" ", 1) for line in lines)}

    names = [
        *('transduce_new_tokens_total{run="toy"}', 'transduce_decoding_seconds_count{run="toy"}'),
        *('transduce_decoding_seconds_sum{run="toy"}', 'transduce_decoding_seconds_bucket{le="+Inf",run="toy"}'),
        *(f'transduce_requests_total{{route="unknown",status="{status}"}}' for status in (404, 405)),
    ]
    before = counts()
    asked: list[tuple[str, Any]] = [("/v1/translate", {"text": LINES[0]}), ("/nothing", {}), ("/ready", {})]
    assert [server.request(*one)[0] for one in asked] == [200, 404, 405]
    after = counts()
    assert not [name for name in names if after.get(name, 0) <= before.get(name, 0)]


def test_the_description_of_the_interface_is_that_of_the_service(server: Server) -> None:
    description = server.request("/openapi.json")[1]
    schemas = description["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description))) == set(schemas)
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            if "requestBody" in operation:  # an empty body is refused by the class that the description names
                (reference,) = {body["schema"]["$ref"] for body in operation["requestBody"]["content"].values()}
                required = schemas[reference.rpartition("/")[2]].get("required", [])
                status, answer = server.request(path.replace("{model}", "x"), {})
                assert method == "post" and (not required or (status == 400 and required[0] in json.dumps(answer)))
    with urllib.request.urlopen(f"{server.url}/docs", timeout=30) as response:
        page = response.read().decode()
    assert all(path in page for path in description["paths"]) and "split_sentences" in page


@pytest.mark.parametrize("target", ["/", "a:1", "/v1/translate"])
def test_connect_is_an_unknown_method(server: Server, target: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert re.match(rb"HTTP/1.1 40[045] ", client.recv(4096))
    assert server.request("/health")[0] == 200


def test_nul_and_other_control_characters_are_text(server: Server) -> None:
    assert server.request("/v1/translate", {"text": "a\x00b \x1c c\u2028d \U0010ffff"})[0] == 200


def test_texts_in_the_access_log_contain_nothing_that_a_terminal_obeys(toy: Path) -> None:
    text = "a\x1b[2J\x7f\x9b31m\u0085\u2028\u202e\u2066\U000e0001\nzwölf 猫"
    server = Server(f"en-de={toy}", "--log-text")
    assert server.request("/v1/translate", {"text": text, "target": "de"})[0] == 200
    server.wait_for_log("{")  # it is written after the response
    assert server.stop() == 0
    (line,) = [line for line in server.log if line.startswith("{")]
    assert escape(line) == line and "zwölf 猫" in line and json.loads(line)["texts"] == [text]


def test_api_keys(toy: Path, tmp_path: Path) -> None:
    import deepl

    made = transduce("serve", "--new-api-key", "alice")
    (secret,) = re.findall(r"key: (\S+)", made.err)
    (tmp_path / "keys").write_text(made.out, encoding="utf-8")
    server = Server(f"en-de={toy}", "--api-key-file", tmp_path / "keys")
    body = {"q": "a", "source": "en", "target": "de"}
    try:
        assert server.request("/translate", body)[0] == 401
        assert server.request("/translate", {**body, "api_key": "wrong"})[0] == 401
        with pytest.raises(deepl.AuthorizationException):
            deepl.DeepLClient("wrong", server_url=server.url).get_usage()
        with pytest.raises(deepl.AuthorizationException):
            deepl.DeepLClient("wrong", server_url=server.url).list_glossaries()
        assert server.request("/translate", {**body, "api_key": secret})[0] == 200
        for header in (
            {"Authorization": f"Bearer {secret}"},
            {"Authorization": f"DeepL-Auth-Key {secret}"},
            {"X-API-Key": secret},
        ):
            assert server.request("/translate", body, **header)[0] == 200
        assert server.request("/ready") == (200, {"ready": True}) and server.request("/health")[0] == 200
        (tmp_path / "keys").write_text(f"bob {'0' * 64}\n", encoding="utf-8")
        assert server.request("/translate", {**body, "api_key": secret})[0] == 401
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run folder"),
        (["/nowhere"], "/nowhere"),
        (["RUN", "--host", "1.2.3.4.5"], "give another host or port"),
        (["RUN", "RUN"], "is given twice"),
        (["RUN", "--api-key-file", "/nowhere"], "/nowhere"),
        (["RUN", "--certificate-key", "/nowhere"], "needs certificate"),
        (["RUN", "--certificate", "/nowhere"], "No such file"),
        (["RUN", "--certificate", __file__], f"certificate = {__file__}: no certificate in PEM"),
        (["RUN", "--cors", "http://a/"], "cors = http://a/: an origin has no path"),
        (["RUN", "--glossary-file", "/nowhere/x.json"], "/nowhere/x.json"),
    ],
)
def test_bad_arguments(toy: Path, arguments: list[str], message: str) -> None:
    done = transduce("serve", *(toy if a == "RUN" else a for a in arguments), "--port", "0")
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_taken_port_is_refused(server: Server, toy: Path) -> None:
    done = transduce("serve", toy, "--port", server.port)
    assert done.code == 2 and "give another host or port" in done.err
