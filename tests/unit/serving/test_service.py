"""The service without HTTP: many callers, deadlines, cancelling, pivots, replaced runs."""

from __future__ import annotations

import asyncio
import math
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
from transduce.data.examples import Example
from transduce.decoding.queue import BURST, ExpiredError
from transduce.decoding.results import Translation
from transduce.errors import RunFolderError, SettingsError
from transduce.logging import Log
from transduce.native.library import load_library
from transduce.serving.inspection_page import InspectionPage
from transduce.serving.limits import DrainingError, Limits, OverloadedError
from transduce.serving.routes import RunSpec, ServedRun
from transduce.serving.server import _reload_when_asked
from transduce.serving.service import Service
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.tags.translating import TextFormat, translate_formatted
from transduce.serving.texts import choose_routes, translate_texts

pytestmark = pytest.mark.anyio
LINES = marians.LINES[:20]
OPTIONS = DecodingOptions(beam=2, n_best=2)
PATIENT = Limits(seconds=50)  # on a busy machine
SHORT = DecodingOptions(max_length=12)
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
        assert rest == expected and first.text == last.text == ""
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


async def test_parts_of_a_translation_as_it_grows(run: Path) -> None:
    async with served(f"en-de={run}") as service:
        for options in (DecodingOptions(beam=1), OPTIONS):
            (expected,) = (await service.translate(LINES[:1], service.route(), options)).sentences
            parts = list[str]()
            found = await service.translate(LINES[:1], service.route(), options, on_part=parts.append)
            assert found.sentences == [expected]
            assert len(parts) > 1 or options.beam != 1 or isinstance(load_library(), str)
            assert not parts or expected.text.startswith(parts[0])


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
        assert found.sentences == second.translate([one.text for one in first.translate(LINES[:5])])
        with pytest.raises(SettingsError, match=r"from fr to any; available: en-de, de-fr, en-fr"):
            service.route("fr")
        assert [service.route(name=name).name for name in ("y", "EN-de", "en-fr")] == ["y", "x", "x+y"]
        assert service.route("", "").name == "x"  # as in forms
        with pytest.raises(SettingsError, match="did you mean 'x'"):
            service.route(name="xx")


async def test_an_empty_source_language_is_detected(run: Path) -> None:
    async with served(f"en-fr={run}", f"de-fr={copy_of(run)}") as service:
        (route,), (guess,) = await choose_routes(service, ["Der Hund schläft."], "", "fr", end=math.inf)
        assert route.source == guess["language"] == "de"


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

        async def failing(spec: RunSpec) -> ServedRun:
            if spec.path == run:
                raise MemoryError
            return await load(spec)

        monkeypatch.setattr("transduce.serving.service._identity", lambda path: "replaced")
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
        assert alone[0].text == found[2].text and len(alone[0].alternatives(3)) <= 1
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


def copy_of(run: Path) -> Path:
    second = run.parent / "y"
    if not second.exists():
        shutil.copytree(run, second)
    return second


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
        pivoted = await translate_texts(service, lines, [route] * len(lines), split=False, scores=True)
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
        score, sizes, go = engine.score, list[int](), threading.Event()
        started = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()

        def wait(pairs: Sequence[Example], **options: Any) -> object:
            sizes.append(sum(len(one.src) + len(one.tgt) for one in pairs))
            loop.call_soon_threadsafe(started.release)
            go.wait(20)
            return score(pairs, **options)

        monkeypatch.setattr(engine, "score", wait)
        found = await service.translate(texts, service.route(), SHORT)
        find = partial(found.align, wanted=[True]) if extra == "alignment" else found.score
        with pytest.raises(ExpiredError):
            await find(service.deadline(0.3))
        leaving = asyncio.ensure_future(find(math.inf))
        await started.acquire()
        await started.acquire()
        assert len(sizes) == 2 and max(sizes) == service.admission.n_tokens < 5000
        assert (await service.translate(LINES[:1], service.route(), SHORT)).sentences[0].text
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        go.set()
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


async def test_documents_and_kept_parts(run: Path, engine: str) -> None:
    second = f"<p>{LINES[1]} <b>{LINES[2]}</b> http://x.y/z &amp; {LINES[3]}<br/> </p>"
    html = f"<p>{LINES[0]}</p>\n  {second}<pre>{LINES[4]}</pre>"
    plain = f"{LINES[0]}\n\n{LINES[1]} {LINES[2]}"
    async with served(f"en-de={run}") as service:
        route = service.route()
        (first,) = await translate_texts(service, [LINES[0]], [route])
        (found,) = await translate_formatted(service, [html], [route], TextFormat(MarkupRules(kind="html")))
        start, _, rest = found.partition("</p>\n  <p>")
        assert start == f"<p>{escape(first.text, quote=False)}"
        assert rest.count("http://x.y/z") == rest.count("<b>") == rest.count("</b>") == 1
        assert rest.endswith(f"<br/> </p><pre>{LINES[4]}</pre>")
        same = await translate_formatted(service, [plain, "", " "], [route] * 3, TextFormat())
        assert same == [one.text for one in await translate_texts(service, [plain, "", " "], [route] * 3)]
        (kept,) = await translate_formatted(service, [LINES[0] + " {x}"], [route], TextFormat(terms={"reads": "liest"}))
        assert kept.count("{x}") == kept.count("liest") == 1
        form = TextFormat(terms={"reads": "liest"})
        for alone, expected in (("http://x.y/z", "http://x.y/z"), ("a@b.de: {x}!", "a@b.de: {x}!"), ("reads", "liest")):
            text = f"{LINES[0]}\n\n {alone} "
            (kept,) = await translate_formatted(service, [text], [route], form)
            assert kept.endswith(f"\n\n {expected} ")
            assert await translate_formatted(service, [alone], [route], form) == [expected]
