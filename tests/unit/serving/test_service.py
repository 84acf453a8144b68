"""The service without HTTP: many callers, deadlines, cancelling, pivots, replaced runs."""

import asyncio
import math
import re
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import pytest

import marians
import text_runs
from native_engines import library_missing
from transduce import DecodingOptions, Translator
from transduce.data.store import Example
from transduce.decoding.alignment import Alignment
from transduce.decoding.queue import BURST, ExpiredError
from transduce.decoding.results import Translation
from transduce.errors import RunFolderError, SettingsError
from transduce.kernels.library import load_library
from transduce.logging import Log
from transduce.serving.access import DrainingError, Limits, OverloadedError
from transduce.serving.inspection_page import InspectionPage
from transduce.serving.server import _reload_when_asked
from transduce.serving.service import RunSpec, ServedRun, Service
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.texts import TextFormat, choose_routes, translate_formatted, translate_or_keep, translate_texts

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unchecked")]
LINES = marians.LINES[:20]
OPTIONS = DecodingOptions(beam=2, n_best=2)
PATIENT = Limits(seconds=50)  # on a busy machine
SHORT = DecodingOptions(max_length=12)
WHOLE = DecodingOptions(split=False)
ResultT = TypeVar("ResultT")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marians.make_run(tmp_path_factory.mktemp("runs") / "x")


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with decoding settings other than the defaults."""
    return marians.make_run(tmp_path_factory.mktemp("runs") / "brief", decoding={"beam": 1, "max_length": 3})


@pytest.fixture(params=["native", "torch"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and isinstance(load_library(), str):
        pytest.skip("no native library")
    with library_missing() if request.param == "torch" else nullcontext():
        yield str(request.param)


@asynccontextmanager
async def served(*specs: str, **options: Any) -> AsyncIterator[Service]:
    """A service of these runs, for a minute at most."""
    service = Service([RunSpec.parse(spec) for spec in specs], **{"limits": PATIENT, **options})
    async with asyncio.timeout(60):
        await service.start()
        try:
            yield service
        finally:
            await service.close()


async def as_request(service: Service, work: Awaitable[ResultT]) -> ResultT:
    with service.request():
        return await work


async def test_concurrent_callers_get_their_own_translations(run: Path, engine: str) -> None:
    expected = Translator.load(run).translate(LINES, OPTIONS)
    async with served(f"en-de={run}") as service:
        calls = (service.translate([line], service.route(), OPTIONS) for line in LINES * 3)
        found = [one.sentences[0] for one in await asyncio.gather(*calls)]
        assert found == expected * 3
        first, *rest, last = (await service.translate(["", *LINES, " "], service.route(), OPTIONS)).sentences
        assert rest == expected and (first.text, last.text) == ("", " ")
        assert service.n_requests == service.admission.n_tokens == 0


async def test_options_that_are_not_given_are_those_of_the_run(brief: Path, engine: str) -> None:
    translator = Translator.load(brief)
    for options, most in ((DecodingOptions(), 3), (DecodingOptions(n_best=8), 3), (DecodingOptions(max_length=5), 5)):
        expected = translator.translate(LINES[:3], options)
        assert max(len(candidate.ids) for one in expected for candidate in one.candidates) == most
        async with served(f"en-de={brief}") as service:
            found = await service.translate(LINES[:3], service.route(), options)
            assert list(found.sentences) == expected


async def test_deadlines_and_cancelled_callers(run: Path, engine: str) -> None:
    async with served(f"en-de={run}") as service:
        with pytest.raises(ExpiredError):
            await service.translate(LINES, service.route(), end=service.deadline(1e-9))
        tasks = [asyncio.ensure_future(service.translate(LINES, service.route())) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks) and service.admission.n_tokens == 0
        assert (await service.translate(LINES[:1], service.route())).sentences[0].text


async def test_more_than_the_limits_is_refused(run: Path) -> None:
    async with served(f"en-de={run}", limits=Limits(max_tokens=10_000, drain_seconds=0.5)) as service:
        tasks = [asyncio.ensure_future(service.translate(LINES, service.route())) for _ in range(4)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(found[0], BaseException) and isinstance(found[-1], OverloadedError)
        assert "too much text" in str(found[-1])
        with pytest.raises(SettingsError, match="at most 10,000 are allowed"):  # more than its place alone
            await service.translate(LINES, service.route(), DecodingOptions(max_length=1000))
        with service.request():
            draining = asyncio.ensure_future(service.drain())
            await asyncio.sleep(0.05)
            assert not draining.done() and service.is_draining
            with pytest.raises(DrainingError), service.request():
                pass
        assert await draining
        service.is_draining = False
        with service.request():
            assert not await service.drain()


async def test_routes_and_pivots(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "y"))
    first, second = Translator.load(run), Translator.load(other)
    async with served(f"en-de={run}", f"de-fr={other}", pivot=True) as service:
        assert [(r.source, r.target, r.name) for r in service.routes] == [
            ("en", "de", "x"),
            ("de", "fr", "y"),
            ("en", "fr", "x+y"),
        ]
        found = await service.translate(LINES[:5], service.route("EN", "fr"))
        expected = second.translate([one.text for one in first.translate(LINES[:5])])
        assert [one.text for one in found.sentences] == [one.text for one in expected]
        with pytest.raises(SettingsError, match=r"from fr to any; available: en-de, de-fr, en-fr"):
            service.route("fr")
        assert [service.route(name=name).name for name in ("y", "EN-de", "en-fr")] == ["y", "x", "x+y"]
        assert service.route("", "").name == "x"  # as in forms
        with pytest.raises(SettingsError, match="did you mean 'x'"):
            service.route(name="xx")


async def test_the_source_language_is_detected(run: Path) -> None:
    texts = ["The old doctor sleeps.", "Der alte Arzt schläft.", "Le vieux médecin dort.", "123", "😀"]
    async with served(f"en-fr={run}", f"de-fr={copy_of(run)}") as service:
        for source in ("", None, "auto"):
            routes, guesses = await choose_routes(service, texts, source, "fr", end=math.inf)
            assert [route and route.source for route in routes] == ["en", "de", None, None, None]
            assert [guess["language"] for guess in guesses[:3]] == ["en", "de", "fr"]
            assert [guess["confidence"] > 0 for guess in guesses] == [True, True, True, False, False]
            assert all(type(guess["confidence"]) is int for guess in guesses)
        routes, guesses = await choose_routes(service, texts, "EN", "fr", end=math.inf)
        assert [route and route.source for route in routes] == ["en"] * 5
        with pytest.raises(ExpiredError):
            await choose_routes(service, texts, "auto", "fr", end=service.deadline(1e-9))


async def test_languages_that_cannot_be_detected(run: Path) -> None:
    async with served(str(run)) as service:  # src-tgt
        (route,), (guess,) = await choose_routes(service, ["123"], "auto", "tgt", end=math.inf)
        assert route is not None and guess["language"] == route.source == "src"
    async with served(f"fo-en={run}", f"ht-en={copy_of(run)}") as service:
        with pytest.raises(SettingsError, match="fo, ht: these languages cannot be detected; name the source language"):
            await choose_routes(service, ["Der Hund schläft."], "auto", "en", end=math.inf)


async def test_other_languages_are_detected_beside_one_that_cannot_be(run: Path) -> None:
    texts = ["Der Hund schläft.", "ໝາໃຫຍ່ເຫັນ ປຶ້ມໃໝ່", "ឆ្កែធំឃើញសៀវភៅ iPhone"]
    async with served(f"fo-en={run}", f"de-en={copy_of(run)}", f"lo-en={copy_of(run, 'z')}") as service:
        routes, guesses = await choose_routes(service, texts, "auto", "en", end=math.inf)
        assert [route and route.source for route in routes] == ["de", "lo", None]
        assert [guess["language"] for guess in guesses] == ["de", "lo", "km"]
        *_, other = await translate_or_keep(service, texts, routes, guesses, None, end=math.inf)
        assert other.text == texts[2] and "not translated: detected as 'km'" in other.note["note"]


async def test_languages_have_aliases(run: Path) -> None:
    async with served(f"en-no={run}", f"he-zh_Hant={copy_of(run)}") as service:
        for pair in (("en", "nb"), ("EN_us", "NO"), ("en-GB", "nb_NO"), ("en", "no-NO")):
            assert service.route(*pair).name == "x"
        for pair in (("iw", "zt"), ("HE", "zh-hant"), ("he-IL", "ZH_TW"), ("IW", "zh")):
            assert service.route(*pair).name == "y"
        for name, run_name in (("en-nb", "x"), ("EN_no", "x"), ("iw-zt", "y"), ("he_zh_hant", "y"), ("HE-zh-TW", "y")):
            assert service.route(name=name).name == run_name
        for name in ("en-zt", "nb-en", "-", "-" * 10**6):
            with pytest.raises(SettingsError, match="available: x, y"):
                service.route(name=name)


async def test_a_replaced_run_is_swapped_without_a_failed_request(tmp_path: Path) -> None:
    path = marians.make_run(tmp_path / "x", seed=1)
    old = Translator.load(path).translate(LINES)
    async with served(f"en-de={path}") as service:
        assert await service.reload() == ([], [])
        shutil.rmtree(path)
        names, (error,) = await service.reload()  # the old run stays
        assert not names and isinstance(error, RunFolderError)
        marians.make_run(path, seed=2)
        new = Translator.load(path).translate(LINES)
        running = asyncio.ensure_future(as_request(service, service.translate(LINES, service.route())))
        await asyncio.sleep(0)
        assert await service.reload() == (["x"], [])
        assert (await running).sentences == old != new
        assert (await service.translate(LINES, service.route())).sentences == new


async def test_a_run_that_cannot_be_loaded_does_not_keep_others_from_being_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(run)
    async with served(f"en-de={run}", f"de-fr={other}") as service:
        old, load = service.runs, service._load

        async def failing(specs: Sequence[RunSpec]) -> ServedRun:
            if specs[0].path == run:
                raise MemoryError
            return await load(specs)

        monkeypatch.setattr("transduce.serving.service.identity_of", lambda runs: "replaced")
        monkeypatch.setattr(service, "_load", failing)
        log, hangup, page = "", asyncio.Event(), InspectionPage({})
        page._models["y"] = object()  # type: ignore[assignment]
        hangup.set()
        reloading = asyncio.ensure_future(_reload_when_asked(service, hangup, 0.0, Log(), page))
        async with asyncio.timeout(60):
            while "new model in service: y" not in log:
                await asyncio.sleep(0.01)
                log += capsys.readouterr().err
        reloading.cancel()
        page.close()
        assert "the old model stays in service: MemoryError" in log and not page._models
        assert [new is before for new, before in zip(service.runs, old, strict=True)] == [True, False]


async def test_an_ensemble_is_served_and_reloaded(run: Path, tmp_path: Path) -> None:
    other = marians.make_run(tmp_path / "y", seed=2)
    async with served(f"en-de={run}+{other}") as service:
        for seed in (3, 4):
            expected = Translator.load([run, other]).translate(LINES[:4], OPTIONS)
            assert list((await service.translate(LINES[:4], service.route("en", "de"), OPTIONS)).sentences) == expected
            shutil.rmtree(other)
            marians.make_run(other, seed=seed)
            assert await service.reload() == (["x"], [])


async def test_a_language_model_has_no_languages(tmp_path: Path) -> None:
    path = text_runs.make_run(tmp_path / "gpt", **text_runs.GPT)
    async with served(str(path)) as service:
        assert list(service.generators()) == ["gpt"] and not service.routes
    with pytest.raises(SettingsError, match="language model"):
        async with served(f"en-de={path}"):
            pass


async def test_texts_keep_their_form(run: Path) -> None:
    translator = Translator.load(run)
    async with served(f"en-de={run}") as service:
        text = "  A man reads the ball. Two women schläft books.\n\n- A man reads.\n"
        route = service.route()
        found = await translate_texts(service, [text, "", "A man reads."], [route] * 3, OPTIONS)
        a, b, c = (one.text for one in translator.translate([
            "A man reads the ball.", "Two women schläft books.", "- A man reads."], OPTIONS))  # fmt: skip
        assert found[0].text == f"  {a} {b}\n\n{c}\n" and found[1].text == ""
        alone = await translate_texts(service, ["A man reads."], [route], OPTIONS)
        assert alone[0].text == found[2].text and len(alone[0].candidates) <= 2
        for space in (" ", "\n\n", ""):
            (begun,) = await translate_texts(service, [f"{space}A man reads."], [route], OPTIONS, prefixes=["wei"])
            assert begun.text.startswith(f"{space}wei")


@pytest.mark.parametrize("text", ["en=runs/x", "-de=runs/x", "en-de=", "en-=x"])
def test_runs_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SettingsError, match="SOURCE-TARGET=RUN"):
        RunSpec.parse(text)


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "lr=0.1"
    path.mkdir()
    assert RunSpec.parse(str(path)) == RunSpec(path)
    assert RunSpec.parse(f"en-de={path}") == RunSpec(path, "en", "de")
    assert RunSpec.parse(f"en-de={path}+x") == RunSpec(path, "en", "de", (Path("x"),))


def copy_of(run: Path, name: str = "y") -> Path:
    second = run.parent / name
    if not second.exists():
        shutil.copytree(run, second)
    return second


async def test_a_pivot_has_the_notes_of_all_its_steps(run: Path) -> None:
    async with served(f"en-de={run}", f"de-fr={copy_of(run)}", pivot=True) as service:
        single, double = service.route("en", "de"), service.route("en", "fr")
        cut = DecodingOptions(max_length=2)
        (first,) = (await service.translate([f"{LINES[0]} ☃"], single, cut)).sentences
        (both,) = (await service.translate([f"{LINES[0]} ☃"], double, cut)).sentences
        assert first.note and not first.finished
        assert first.note in both.note and not both.finished


async def test_alignments(run: Path, engine: str) -> None:
    translator = Translator.load(run)
    text = f"{LINES[0]}\n\n{LINES[1]}"
    async with served(f"en-de={run}", f"de-fr={copy_of(run)}", pivot=True) as service:
        (found,) = await translate_texts(service, [text], [service.route("en", "de")], SHORT, align=[0])
        best = [one.text for one in found.sentences]
        assert list(found.links) == translator.align(found.parts[::2], best)
        (pivoted,) = await translate_texts(service, [LINES[0]], [service.route("en", "fr")], SHORT, align=[0])
        for a, b, c, d in pivoted.links[0]:
            assert 0 <= a < b <= len(LINES[0]) and 0 <= c < d <= len(pivoted.text)
        sentences = await service.translate([*LINES[:3], "", ""], service.route("en", "de"), SHORT)
        with pytest.raises(ExpiredError):
            await sentences.align(service.deadline(1e-9), [True] * 5)
        links = await sentences.align(service.deadline(), [False, True, True, True, True])
        assert list(map(bool, links)) == [False, True, True, False, False] and service.admission.n_tokens == 0


async def test_scores_are_those_of_the_tokens_that_were_found(run: Path) -> None:
    translator = Translator.load(run)
    lines = [*LINES[:3], "", ""]
    async with served(f"en-de={run}", f"de-fr={copy_of(run)}", pivot=True) as service:
        route = service.route("en", "fr")
        (found,) = await translate_texts(service, ["\n".join(lines[:3])], [service.route("en", "de")], scores=True)
        expected = translator.score(lines[:3], [one.ids for one in found.sentences])
        assert list(found.scores) == expected
        for one, score in zip(found.sentences, found.scores, strict=True):
            assert sum(score.token_log_probs[: len(one.ids) + one.finished]) == pytest.approx(one.log_prob, rel=1e-4)
        pivoted = await translate_texts(service, lines, [route] * len(lines), WHOLE, scores=True)
        assert [len(one.scores) for one in pivoted] == [1] * len(lines)
        assert [one.scores[0].n_tokens for one in pivoted[-2:]] == [0, 0]
        texts = [one.text for one in translator.translate(lines[:3])]
        middle = translator.translate(texts)
        expected = translator.score(texts, [one.ids for one in middle])
        assert [one.scores[0] for one in pivoted[: len(lines[:3])]] == expected


@pytest.mark.parametrize("extra", ["alignment", "scores"])
async def test_scoring_stops_soon_when_its_time_is_up_or_its_caller_leaves(
    tmp_path: Path, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = marians.make_run(tmp_path / "x", max_positions=2000)
    text = " ".join(LINES * 2)
    texts = [text] if extra == "alignment" else [text] * 10
    async with served(f"en-de={path}") as service:
        engine = service.runs[0].translator.translator.engine
        score, sizes, gates = engine.score, list[int](), [threading.Event(), threading.Event()]
        started = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()

        def wait(pairs: Sequence[Example], **options: Any) -> object:
            sizes.append(sum(len(one.src) + len(one.tgt) for one in pairs))
            loop.call_soon_threadsafe(started.release)
            gates[len(sizes) > 1].wait(20)
            return score(pairs, **options)

        monkeypatch.setattr(engine, "score", wait)
        found = await service.translate(texts, service.route(), SHORT)
        find = partial(found.align, wanted=[True]) if extra == "alignment" else found.score
        with pytest.raises(ExpiredError):
            await find(service.deadline(0.3))
        gates[0].set()
        leaving = asyncio.ensure_future(find(math.inf))
        await started.acquire()
        await started.acquire()
        assert len(sizes) == 2 and max(sizes) == service.admission.n_tokens < 5000
        assert (await service.translate(LINES[:1], service.route(), SHORT)).sentences[0].text
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gates[1].set()
        assert service.admission.n_tokens == 0
        await find(math.inf)
        assert len(sizes) > 4
        with pytest.raises(ExpiredError):
            await find(service.deadline(0))


async def test_others_proceed_while_a_request_has_many_sentences(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(f"en-de={run}") as service:
        model = service.runs[0].translator
        batcher, decode, counts, threads = model.queue._batcher, model.translator.decode, [0], set[int]()
        submit = batcher.submit

        def counted_submit(first: int, inputs: Sequence[Any], *arguments: Any, **options: Any) -> None:
            counts[-1] += len(inputs)
            submit(first, inputs, *arguments, **options)

        def watched_decode(*arguments: Any) -> Translation:
            threads.add(threading.get_ident())
            return decode(*arguments)

        async def other() -> None:
            while True:
                counts.append(0)
                await asyncio.sleep(0)

        monkeypatch.setattr(batcher, "submit", counted_submit)
        monkeypatch.setattr(model.translator, "decode", watched_decode)
        watching = asyncio.ensure_future(other())
        (found,) = await translate_texts(service, ["a\n" * 2000], [service.route()], DecodingOptions(max_length=1))
        watching.cancel()
        assert len(found.sentences) == 2000 == sum(counts) and max(counts) <= BURST
        assert threading.get_ident() not in threads


async def test_work_of_a_request_that_has_begun_is_not_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(f"en-de={run}", f"de-fr={copy_of(run)}", pivot=True) as service:
        pivot, first = service.route("en", "fr"), service.runs[0].translator
        with ExitStack() as stack:
            translate = first.translate

            async def then_busy(*arguments: Any, **options: Any) -> Any:
                found = await translate(*arguments, **options)
                stack.enter_context(service.admission.tokens(10**6, refuse=False))
                return found

            monkeypatch.setattr(first, "translate", then_busy)
            assert (await service.translate(LINES[:1], pivot, SHORT)).sentences[0].text
            with pytest.raises(OverloadedError, match="too much text"):
                await service.translate(LINES[:1], pivot, SHORT)
            assert (await service.translate(LINES[:1], service.route(), SHORT, refuse=False)).sentences[0].text


async def formatted_texts(*arguments: Any) -> list[str]:
    return [translation.text for translation in await translate_formatted(*arguments)]


async def test_documents_and_kept_parts(run: Path, engine: str) -> None:
    second = f"<p>{LINES[1]} <b>{LINES[2]}</b> http://x.y/z &amp; {LINES[3]}<br/> </p>"
    html = f"<p>{LINES[0]}</p>\n  {second}<pre>{LINES[4]}</pre>"
    plain = f"{LINES[0]}\n\n{LINES[1]} {LINES[2]}"
    async with served(f"en-de={run}") as service:
        route = service.route()
        (first,) = await translate_texts(service, [LINES[0]], [route])
        (found,) = await formatted_texts(service, [html], [route], TextFormat(MarkupRules(kind="html")))
        start, _, rest = found.partition("</p>\n  <p>")
        assert start == f"<p>{escape(first.text, quote=False)}"
        assert rest.count("http://x.y/z") == rest.count("<b>") == rest.count("</b>") == 1
        assert rest.endswith(f"<br/> </p><pre>{LINES[4]}</pre>")
        same = await formatted_texts(service, [plain, "", " "], [route] * 3, TextFormat())
        assert same == [one.text for one in await translate_texts(service, [plain, "", " "], [route] * 3)]
        (kept,) = await formatted_texts(service, [LINES[0] + " {x}"], [route], TextFormat(terms={"reads": "liest"}))
        assert kept.count("{x}") == kept.count("liest") == 1
        form = TextFormat(terms={"reads": "liest"})
        for alone, expected in (("http://x.y/z", "http://x.y/z"), ("a@b.de: {x}!", "a@b.de: {x}!"), ("reads", "liest")):
            text = f"{LINES[0]}\n\n {alone} "
            (kept,) = await formatted_texts(service, [text], [route], form)
            assert kept.endswith(f"\n\n {expected} ")
            assert await formatted_texts(service, [alone], [route], form) == [expected]


KEPT_PARTS = [
    ("a man <x id='0'/> reads .", ["<x id='0'/>"], r".* <x id='0'/>( .*)?"),
    ("'<x id='0'/>' plays with <y/>", ["<x id='0'/>", "<y/>"], r".*<x id='0'/>.* <y/>"),
    ("<img/> a man reads . <img/>", ["<img/>"] * 2, r"<img/> [^<]+ <img/>"),
    ("<code>@anna</code> Kinder reads .", ["<code>@anna</code>"], r"<code>@anna</code> [^<]+"),
    ("<code>@anna</code>: Kinder reads .", ["<code>@anna</code>"], r"<code>@anna</code>: [^<]+"),
    ("<code>Anna</code> reads", ["<code>Anna</code>"], r".*<code>Anna</code>.*"),
    ("a <b>man <code>f(x)</code> plays</b> {a} {b}.", ["<code>f(x)</code>", "{a} {b}", "<b>", "</b>"], ".*"),
    ("a man plays with %1$sx%2$s, %d%% , http://x.y/z", ["%1$s", "%2$s", "%d%%", "http://x.y/z"], ".*"),
    ("{n, plural, one {# man} other {# men}} reads", ["{n, plural, one {# man} other {# men}}"], ".*"),
    ("a man &amp; <code>&lt;é&gt;</code> , \U00100000 plays", ["<code>&lt;é&gt;</code>", "\U00100000"], ".*"),
    ("<x/> <code>{x}</code> - <y/>", ["<x/> <code>{x}</code> - <y/>"], r"<x/> <code>{x}</code> - <y/>"),
]


@pytest.mark.parametrize("pivot", [False, True])
async def test_parts_that_stay_are_placeholders(tmp_path: Path, engine: str, pivot: bool) -> None:
    """With random weights and beams, so that only the search sees to it."""
    first = marians.make_run(tmp_path / "x", placeholders=8, max_positions=400)
    second = marians.make_run(tmp_path / "y", placeholders=8, max_positions=400, seed=2)
    form = TextFormat(MarkupRules(kind="xml", ignore=frozenset({"code"})))
    async with served(f"en-de={first}", *[f"de-fr={second}"] * pivot, pivot=pivot) as service:
        route = service.route("en", "fr" if pivot else "de")
        assert route.has_placeholders and len(route.steps) == 1 + pivot
        documents = [document for document, *_ in KEPT_PARTS]
        results = await formatted_texts(service, documents, [route] * len(documents), form, SHORT)
        for (document, parts, pattern), result in zip(KEPT_PARTS, results, strict=True):
            assert [result.count(part) for part in parts] == [document.count(part) for part in parts], result
            assert pivot or re.fullmatch(pattern, result), result


async def test_texts_with_tags_have_the_notes_of_their_sentences(tmp_path: Path) -> None:
    async with served(f"en-de={marians.make_run(tmp_path / 'x', placeholders=8)}") as service:
        documents = ["<p>a man <b>漢</b> reads <x/> .</p><p>{x} a Ж man</p>", "<p>a man <x/> reads</p>"]
        form, routes = TextFormat(MarkupRules(kind="xml")), [service.route()] * 2
        noted, plain = await translate_formatted(service, documents, routes, form, SHORT)
        assert "kept as written: 漢" in noted.note["note"] and "kept as written: Ж" in noted.note["note"]
        assert not any(map(str.isprintable, set(noted.note["note"]) - set(map(chr, range(0x10000)))))
        assert "vocabulary" not in plain.note.get("note", "")


async def test_a_term_of_a_glossary_is_a_placeholder_and_needs_no_alignment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = marians.make_run(tmp_path / "x", placeholders=8)
    async with served(f"en-de={run}") as service:
        monkeypatch.setattr(Alignment, "read", None)
        form = TextFormat(terms={"man": "Männchen", "the ball": "das Bällchen"})
        (result,) = await formatted_texts(service, ["a man reads the ball ."], [service.route()], form, SHORT)
        assert result.count("Männchen") == result.count("das Bällchen") == 1


async def test_translators_without_placeholders_keep_parts_by_alignment(run: Path, tmp_path: Path) -> None:
    other = marians.make_run(tmp_path / "y", placeholders=8)
    async with served(f"en-de={run}", f"de-fr={other}", pivot=True) as service:
        for target in ("de", "fr"):
            route = service.route("en", target)
            assert not route.has_placeholders
            document = "a man {x} reads <img> , <code>f(x)</code> ."
            form = TextFormat(MarkupRules(kind="html"))
            (result,) = await formatted_texts(service, [document], [route], form, SHORT)
            assert [result.count(part) for part in ("{x}", "<img>", "<code>f(x)</code>")] == [1, 1, 1]


async def test_sentences_are_those_of_the_translator(run: Path) -> None:
    text = f"1. {LINES[0]} ({LINES[1]}) {LINES[2]}\r\n\n- {LINES[3]}"
    (expected,) = Translator.load(run).translate([text])
    async with served(f"en-de={run}") as service:
        (found,) = await translate_texts(service, [text], [service.route()])
        assert found.text == expected.text and found.text.startswith("1. ") and "\r\n\n- " in found.text
        translated = [one for one, source in zip(found.sentences, found.parts[::2], strict=True) if source]
        assert translated == [sentence.translation for sentence in expected.sentences] and len(translated) == 4
        (whole,) = await translate_texts(service, [text], [service.route()], WHOLE)
        assert [*whole.parts[::2]] == text.split("\r\n\n")


async def test_tags_around_markers_of_lists_stay(run: Path) -> None:
    async with served(f"en-de={run}") as service:
        form, route = TextFormat(MarkupRules(kind="html")), service.route()
        (found,) = await formatted_texts(service, [f"<b>1.</b> {LINES[0]}"], [route], form)
        (plain,) = await translate_texts(service, [LINES[0]], [route])
        assert found == f"<b>1.</b> {escape(plain.text, quote=False)}"
