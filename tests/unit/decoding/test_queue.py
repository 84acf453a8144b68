"""The queue in front of an engine: results in any company, cancelling, deadlines, order, the lives of threads."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from native_engines import engine_for
from oracle.stand_in import untrained
from transduce.config import Settings
from transduce.decoding import native_queue
from transduce.decoding.engine import Engine, Event, Hypothesis, Source
from transduce.decoding.options import Sampling, TranslationOptions
from transduce.decoding.queue import QueueFullError, TranslationQueue
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import SettingsError, TransduceError

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
SETTINGS = Settings.from_mapping(
    {"model": {"d_model": 32, "d_ff": 48, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2}}
)
MODEL = untrained(SETTINGS, n_src=90, n_tgt=90)
OPTIONS = (
    TranslationOptions(beam=1),
    TranslationOptions(beam=1, scores=False),
    TranslationOptions(beam=2, n_best=2, length_penalty=0.4),
    TranslationOptions(beam=5),
    TranslationOptions(beam=30, n_best=3),
    TranslationOptions(sampling=Sampling(temperature=0.8, top_k=20), seed=3),
    TranslationOptions(sampling=Sampling(top_p=0.9), n_best=3),
)
Make = Callable[[int], Engine]


def native(n_threads: int = 2) -> Engine:
    return engine_for(MODEL, SETTINGS, n_threads=n_threads)


def pytorch(n_threads: int = 2) -> Engine:
    return TorchEngine(MODEL, SETTINGS.decoding)


def sources(n: int, *, seed: int = 0, limit: int = 30) -> list[Source]:
    pick = random.Random(seed)
    return [
        Source((i,), [pick.randrange(4, 90) for _ in range(pick.choice([1, 5, 17, 33]))], pick.choice([1, 9, limit]))
        for i in range(n)
    ]


@contextmanager
def opened(engine: Engine, *, max_open: int = 1000) -> Iterator[tuple[TranslationQueue, SimpleQueue[Event]]]:
    events: SimpleQueue[Event] = SimpleQueue()
    with TranslationQueue(engine, events.put, max_open=max_open) as queue:
        yield queue, events


def ends(events: SimpleQueue[Event], n: int) -> dict[int, Event]:
    """The ends of n sentences, each of which comes once."""
    found: dict[int, Event] = {}
    while len(found) < n:
        event = events.get(timeout=60)
        if event.outcome != "tokens":
            assert event.ticket not in found
            found[event.ticket] = event
    return found


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_result_does_not_depend_on_company_options_or_cancelled_neighbours(n_threads: int) -> None:
    engine, pick = native(n_threads), random.Random(n_threads)
    asked = [(source, pick.choice(OPTIONS)) for source in sources(120)]
    alone = [engine.translate([source], options)[0] for source, options in asked]
    with opened(engine) as (queue, events):
        tickets: dict[int, int] = {}
        cancelled = set()
        for i, (source, options) in enumerate(asked):
            tickets[queue.submit(source, options, stream=pick.random() < 0.5)] = i
            if pick.random() < 0.2:
                ticket = pick.choice(list(tickets))
                queue.cancel(ticket)
                cancelled.add(ticket)
            time.sleep(pick.choice([0, 0, 0.002]))
        found = ends(events, len(asked))
    assert {event.outcome for event in found.values()} <= {"done", "cancelled"}
    assert {ticket for ticket, event in found.items() if event.outcome == "cancelled"} <= cancelled
    for ticket, event in found.items():
        assert event.outcome == "cancelled" or event.hypotheses == alone[tickets[ticket]]
    for options in OPTIONS:  # and in the batches of `translate`
        chosen = [i for i, (_, o) in enumerate(asked) if o == options]
        assert engine.translate([asked[i][0] for i in chosen], options) == [alone[i] for i in chosen]


@pytest.mark.parametrize("make", [native, pytorch])
def test_an_event_loop_delivers_in_its_own_thread(make: Make) -> None:
    engine, asked = make(2), sources(40, limit=9)
    delivered: list[Event] = []

    def deliver(event: Event) -> None:
        assert threading.current_thread() is threading.main_thread()
        delivered.append(event)

    async def use() -> list[int]:
        queue = TranslationQueue(engine, deliver, loop=asyncio.get_running_loop())
        assert not n_threads_named("deliver")
        tickets = [queue.submit(source, OPTIONS[2]) for source in asked]
        while len(delivered) < len(asked):
            await asyncio.sleep(0.001)
        long = queue.submit(Source((0,), [5, 6], 400), OPTIONS[2])
        await asyncio.to_thread(queue.close)
        assert delivered[-1].ticket == long and queue.n_open == 0
        return tickets

    tickets = asyncio.run(use())
    found = {event.ticket: event.hypotheses for event in delivered}
    assert [found[ticket] for ticket in tickets] == engine.translate(asked, OPTIONS[2])


@pytest.mark.parametrize("options", OPTIONS)
def test_streamed_tokens_are_those_of_the_best_hypothesis(options: TranslationOptions) -> None:
    engine = native()
    with opened(engine) as (queue, events):
        for source in sources(12, limit=50):
            ticket, tokens = queue.submit(source, options, stream=True), []
            while (event := events.get(timeout=60)).outcome == "tokens":
                assert event.ticket == ticket and event.tokens
                tokens += event.tokens
            best = event.hypotheses[0]
            assert tuple(tokens) == best.ids[: len(tokens)]
            if options.sampling and options.n_best > 1:
                assert not tokens
            elif (options.beam == 1 or options.sampling) and source.limit > 1:  # the last comes with the end
                assert len(tokens) >= len(best.ids) - 1


@pytest.mark.parametrize("make", [native, pytorch])
def test_a_sentence_ends_at_its_deadline(make: Make) -> None:
    with opened(make(1)) as (queue, events):
        late = queue.submit(sources(1)[0], OPTIONS[0], seconds=0)
        fine = queue.submit(sources(1)[0], OPTIONS[0], seconds=60)
        found = ends(events, 2)
    assert found[late].outcome == "expired" and not found[late].hypotheses
    assert found[fine].outcome == "done"


@pytest.mark.parametrize("make", [native, pytorch])
def test_both_engines_give_what_translate_gives_and_take_what_they_cannot_do_to_pytorch(make: Make) -> None:
    engine, drawn = make(2), TranslationOptions(sampling=Sampling(), n_best=2)
    searched = sources(4, limit=9)
    with_prefix = [replace(source, prefix=(5,)) for source in searched]  # samples after a prefix are PyTorch's
    with opened(engine) as (queue, events):
        for one, asked in ((OPTIONS[0], searched), (OPTIONS[2], searched), (drawn, searched), (drawn, with_prefix)):
            first, *_ = [queue.submit(source, one) for source in asked]
            found = ends(events, len(asked))
            assert [found[first + i].hypotheses for i in range(len(asked))] == engine.translate(asked, one)
        assert queue.n_open == 0


@pytest.mark.parametrize("make", [native, pytorch])
def test_the_queue_is_bounded_and_closing_ends_all(make: Make) -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    queue = TranslationQueue(make(1), events.put, max_open=3)
    source = Source((0,), [5, 6], 100_000 if make is native else 400)
    tickets = [queue.submit(source, OPTIONS[2]) for _ in range(3)]
    with pytest.raises(QueueFullError, match="3 sentences"):
        queue.submit(source, OPTIONS[0])
    queue.cancel(tickets[0])
    queue.close()
    assert set(ends(events, 3)) == set(tickets)
    with pytest.raises(TransduceError, match="closed"):
        queue.submit(source, OPTIONS[0])


@pytest.mark.parametrize("make", [native, pytorch])
def test_what_is_submitted_while_the_queue_closes_ends_or_is_refused(make: Make) -> None:
    engine, source = make(1), Source((0,), [5, 6], 2)
    for _ in range(5):
        ended: list[int] = []
        submitted: list[int] = []
        queue = TranslationQueue(engine, lambda event, ended=ended: ended.append(event.ticket))  # type: ignore[misc]

        def submit(queue: TranslationQueue = queue, submitted: list[int] = submitted) -> None:
            with pytest.raises(TransduceError, match="closed"):
                while True:
                    submitted.append(queue.submit(source, OPTIONS[0]))

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        queue.close()
        for thread in threads:
            thread.join()
        assert sorted(ended) == sorted(submitted) and queue.n_open == 0


@pytest.mark.parametrize("make", [native, pytorch])
@pytest.mark.parametrize("limit", [0, 1_000_001, 1 << 40])
def test_an_impossible_limit_is_refused_and_cannot_break_a_batch(make: Make, limit: int) -> None:
    with opened(make(1)) as (queue, _), pytest.raises(SettingsError, match=r"limit = .*1,000,000"):
        queue.submit(Source((0,), [5, 6], limit), OPTIONS[0])


def test_a_source_that_is_refused_leaves_nothing_behind() -> None:
    with opened(native()) as (queue, events):
        with pytest.raises(SettingsError, match="ids"):
            queue.submit(Source((0,), [90], 5), OPTIONS[0])
        assert queue.n_open == 0
        queue.submit(Source((0,), [9], 5), OPTIONS[0])
        assert ends(events, 1)


def test_an_error_in_the_callers_function_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def deliver(event: Event) -> None:
        seen.put(event.ticket)
        raise ValueError

    with TranslationQueue(native(), deliver) as queue:
        tickets = {queue.submit(source, OPTIONS[0]) for source in sources(3)}
        assert {seen.get(timeout=60) for _ in tickets} == tickets


def test_a_sentence_without_a_deadline_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences with near deadlines keep coming; after its patience the one without is first."""
    monkeypatch.setattr(native_queue, "PATIENCE", 0.2)
    with opened(native(1)) as (queue, events):
        urgent = Source((0,), [7] * 30, 30)
        for _ in range(60):  # more than are decoded at once
            queue.submit(urgent, OPTIONS[3], seconds=50)
        patient = queue.submit(Source((1,), [9], 5), OPTIONS[0])
        while (event := events.get(timeout=60)).ticket != patient:
            if event.outcome == "done":
                queue.submit(urgent, OPTIONS[3], seconds=50)
        assert event.outcome == "done"


def test_threads_submit_cancel_and_translate_at_the_same_time() -> None:
    engine = native(2)
    asked = sources(25, seed=4)
    expected = {o: engine.translate(asked, o) for o in OPTIONS}
    problems: list[object] = []

    def use(seed: int) -> None:
        pick = random.Random(seed)
        with opened(engine) as (queue, events):
            for _ in range(8):
                options = pick.choice(OPTIONS)
                if pick.random() < 0.4:
                    wrong = engine.translate(asked, options) != expected[options]
                else:
                    chosen = pick.sample(range(len(asked)), 12)
                    seconds = [pick.choice([0.0, 0.003, 60.0, 60.0]) for _ in chosen]
                    tickets = [queue.submit(asked[i], options, seconds=s) for i, s in zip(chosen, seconds, strict=True)]
                    queue.cancel(pick.choice(tickets))
                    found = ends(events, len(chosen))
                    results = zip(chosen, (found[ticket] for ticket in tickets), strict=True)
                    wrong = any(e.outcome == "done" and e.hypotheses != expected[options][i] for i, e in results)
                if wrong:
                    problems.append(options)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not problems


def n_threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_threads_end_with_their_engine() -> None:
    gc.collect()
    before = n_threads_named("decode")
    engine = native(2)
    engine.translate(sources(4), OPTIONS[0])
    assert n_threads_named("decode") == before + 2
    queue = TranslationQueue(engine, lambda event: None)
    assert n_threads_named("deliver") == 1
    queue.close()
    assert n_threads_named("deliver") == 0
    del engine, queue
    gc.collect()
    assert n_threads_named("decode") == before


def test_a_call_ends_soon_after_an_interrupt_and_leaves_nothing_behind() -> None:
    engine = native(1)
    asked = [Source((i,), [7] * 20, 400) for i in range(600)]
    engine.translate(asked[:1], OPTIONS[4])
    load = engine._queue.workload  # type: ignore[attr-defined]
    per_batch = load()["n_steps"]  # of 4 sentences, which is as many as are decoded at once

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            engine.translate(asked, OPTIONS[4])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert load()["n_open"] == load()["n_waiting"] == 0
    assert load()["n_steps"] < 100 * per_batch, "most sentences were never decoded"
    assert engine.translate(asked[:1], OPTIONS[0])


def test_a_forked_process_translates_with_threads_of_its_own() -> None:
    engine = native(2)
    expected: list[list[Hypothesis]] = engine.translate(sources(8), OPTIONS[2])
    with opened(engine) as (queue, events):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                same = engine.translate(sources(8), OPTIONS[2]) == expected
                try:
                    queue.submit(sources(1)[0], OPTIONS[0])
                except TransduceError as error:
                    code = 0 if same and "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        queue.submit(sources(1)[0], OPTIONS[0])
        assert ends(events, 1)
