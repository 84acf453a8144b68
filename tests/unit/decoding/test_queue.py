"""The queue in front of an engine: results in any company, cancelling, deadlines, fair order, the lives of threads."""

import asyncio
import gc
import math
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from native_engines import engine_for, needs_library
from oracle.stand_in import untrained
from transduce.config.decoding import DecodingOptions
from transduce.config.settings import Settings
from transduce.decoding import torch_engine
from transduce.decoding.engine import DecodingInput, Engine, Hypothesis
from transduce.decoding.queue import CALLER, DecodingQueue, ExpiredError, QueueClosedError
from transduce.decoding.torch_engine import TorchEngine
from transduce.errors import SettingsError, TransduceError

pytestmark = needs_library
SETTINGS = Settings.from_mapping(
    {"model": {"d_model": 32, "d_ff": 48, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 2}}
)
MODEL = untrained(SETTINGS, n_src=90, n_tgt=90)
OPTIONS = (
    DecodingOptions(beam=1),
    DecodingOptions(beam=1, scores=False),
    DecodingOptions(beam=2, n_best=2, length_penalty=0.4),
    DecodingOptions(beam=5),
    DecodingOptions(beam=30, n_best=3),
    DecodingOptions(sample=True, temperature=0.8, top_k=20, seed=3),
    DecodingOptions(sample=True, top_p=0.9, n_best=3),
)
LONG = DecodingInput((0,), [5, 6], 400)
Make = Callable[[int], Engine]


def native(n_threads: int = 2) -> Engine:
    return engine_for(MODEL, SETTINGS, n_threads=n_threads)


def pytorch(n_threads: int = 2) -> Engine:
    return TorchEngine(MODEL)


both = pytest.mark.parametrize("make", [native, pytorch])


def inputs(n: int, *, seed: int = 0, limit: int = 30) -> list[DecodingInput]:
    pick = random.Random(seed)
    sizes = [(pick.choice([1, 5, 17, 33]), pick.choice([1, 9, limit])) for _ in range(n)]
    return [DecodingInput((i,), [pick.randrange(4, 90) for _ in range(m)], most) for i, (m, most) in enumerate(sizes)]


@asynccontextmanager
async def opened(engine: Engine) -> AsyncIterator[DecodingQueue]:
    queue = DecodingQueue(engine)
    try:
        yield queue
    finally:
        await queue.close()
        assert queue.workload()["n_open"] == 0


def run(work: Callable[[DecodingQueue], Awaitable[None]], engine: Engine) -> None:
    async def main() -> None:
        async with opened(engine) as queue:
            await asyncio.wait_for(work(queue), 60)

    asyncio.run(main())


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_result_does_not_depend_on_company_options_or_cancelled_neighbours(n_threads: int) -> None:
    engine, pick = native(n_threads), random.Random(n_threads)
    asked = [(one, pick.choice(OPTIONS)) for one in inputs(120)]
    alone = [engine.translate([one], options)[0] for one, options in asked]

    async def work(queue: DecodingQueue) -> None:
        tasks = []
        for one, options in asked:
            on_tokens = pick.choice([None, lambda place, tokens: False])
            tasks.append(asyncio.ensure_future(queue.decode([one], options, on_tokens=on_tokens)))
            if pick.random() < 0.2:
                pick.choice(tasks).cancel()
            await asyncio.sleep(pick.choice([0, 0, 0.002]))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) or one == [alone[i]] for i, one in enumerate(found))
        assert sum(isinstance(one, list) for one in found) > 60

    run(work, engine)
    for options in OPTIONS:  # and in the batches of `translate`
        chosen = [i for i, (_, o) in enumerate(asked) if o == options]
        assert engine.translate([asked[i][0] for i in chosen], options) == [alone[i] for i in chosen]


@both
def test_both_engines_give_what_translate_gives(make: Make) -> None:
    engine, drawn = make(2), DecodingOptions(sample=True, n_best=2)
    searched = inputs(8, limit=9)
    with_prefix = [replace(one, prefix=(5,)) for one in searched]

    async def work(queue: DecodingQueue) -> None:
        calls = (OPTIONS[0], searched), (OPTIONS[2], searched), (drawn, searched), (drawn, with_prefix), (drawn, [])
        found = await asyncio.gather(*(queue.decode(asked, options) for options, asked in calls))
        assert found == [engine.translate(asked, options) for options, asked in calls]
        assert sum(queue.n_calls) == len(calls) and queue.call_seconds > 0

    run(work, engine)


@pytest.mark.parametrize("options", OPTIONS)
def test_streamed_tokens_are_those_of_the_best_hypothesis(options: DecodingOptions) -> None:
    async def work(queue: DecodingQueue) -> None:
        for one in inputs(12, limit=50):
            streamed: list[int] = []

            def take(place: int, tokens: tuple[int, ...], streamed: list[int] = streamed) -> bool:
                assert place == 0 and tokens and threading.current_thread() is threading.main_thread()
                streamed.extend(tokens)
                return False

            ((best, *_),) = await queue.decode([one], options, on_tokens=take)
            assert tuple(streamed) == best.ids[: len(streamed)]
            if options.sample and options.n_best > 1:
                assert not streamed
            elif (options.beam == 1 or options.sample) and one.limit > 1:  # the last comes with the end
                assert len(streamed) >= len(best.ids) - 1

    run(work, native())


def test_a_caller_ends_inputs_by_their_tokens_and_its_errors_concern_nobody_else() -> None:
    engine = native()

    def fail(place: int, tokens: tuple[int, ...]) -> bool:
        raise ValueError("mine")

    async def work(queue: DecodingQueue) -> None:
        asked = [LONG, replace(LONG, ids=[7, 8])]
        ended, other, failed = await asyncio.gather(
            queue.decode(asked, OPTIONS[0], on_tokens=lambda place, tokens: place == 0),
            queue.decode(asked, OPTIONS[0]),
            queue.decode(asked, OPTIONS[0], on_tokens=fail),
            return_exceptions=True,
        )
        expected = engine.translate(asked, OPTIONS[0])
        assert ended == [[], expected[1]] and other == expected and repr(failed) == "ValueError('mine')"

    run(work, engine)


@both
def test_a_call_ends_at_its_deadline(make: Make) -> None:
    async def work(queue: DecodingQueue) -> None:
        fine = asyncio.ensure_future(queue.decode(inputs(1), OPTIONS[0], seconds=50))
        with pytest.raises(ExpiredError):
            await queue.decode(inputs(1), OPTIONS[0], seconds=0)
        assert await fine

    run(work, make(1))


GATED = replace(LONG, limit=60)


class Gate:
    """Stops each search of PyTorch's engine with beam 5 at its third step, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_steps, self.reached, self.opened = 0, threading.Event(), threading.Event()
        advance = MODEL.advance

        def gated(ids: Tensor, state: object) -> Tensor:
            self.n_steps += len(ids) == 5
            if len(ids) == 5 and self.n_steps == 3:
                self.reached.set()
                assert self.opened.wait(60)
            hidden: Tensor = advance(ids, state)
            return hidden

        monkeypatch.setattr(MODEL, "advance", gated)

    async def start(self, queue: DecodingQueue) -> asyncio.Task[list[list[Hypothesis]]]:
        """A call that has been stopped."""
        task = asyncio.ensure_future(queue.decode([GATED], OPTIONS[3]))
        await asyncio.to_thread(self.reached.wait, 60)
        return task


def test_pytorch_stops_a_search_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def work(queue: DecodingQueue) -> None:
        left = await gate.start(queue)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert queue.workload()["n_open"] == 0
        gate.opened.set()
        assert await queue.decode(inputs(1), OPTIONS[0])
        assert gate.n_steps == 3

    run(work, TorchEngine(MODEL))
    TorchEngine(MODEL).translate([GATED], OPTIONS[3])
    assert gate.n_steps > 20


def test_calls_expire_while_pytorch_computes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def work(queue: DecodingQueue) -> None:
        running = await gate.start(queue)
        with pytest.raises(ExpiredError):
            await queue.decode(inputs(1), OPTIONS[0], seconds=0.01)
        gate.opened.set()
        assert (await running)[0]

    run(work, TorchEngine(MODEL))


def test_closing_does_not_wait_for_a_step_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_LAST_STEP", 0.01)
    gate = Gate(monkeypatch)

    async def main() -> None:
        async with opened(TorchEngine(MODEL)) as queue:
            running = await gate.start(queue)
        with pytest.raises(QueueClosedError):
            await running

    asyncio.run(main())
    gate.opened.set()


def test_a_cheap_call_is_decoded_between_two_steps_of_a_costly_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    async def work(queue: DecodingQueue) -> None:
        costly = await gate.start(queue)
        cheap = asyncio.ensure_future(queue.decode(inputs(1), OPTIONS[0]))
        await asyncio.sleep(0)
        gate.opened.set()
        assert await cheap and not costly.done()
        assert await costly == TorchEngine(MODEL).translate([GATED], OPTIONS[3])

    run(work, TorchEngine(MODEL))


def test_an_input_that_pytorch_cannot_decode_fails_only_its_call() -> None:
    async def work(queue: DecodingQueue) -> None:
        asked = inputs(6)
        wrong = replace(asked[0], ids=[9, 90])
        calls = [queue.decode([one], OPTIONS[0]) for one in (*asked[:3], wrong, *asked[3:])]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results.pop(3), TransduceError)
        expected = TorchEngine(MODEL).translate(asked, OPTIONS[0])
        assert [call[0][0].ids for call in results] == [best.ids for (best,) in expected]

    run(work, TorchEngine(MODEL))


def start_as(caller: str, n: int, queue: DecodingQueue, one: DecodingInput, seconds: float) -> list[asyncio.Task[Any]]:
    CALLER.set(caller)
    return [asyncio.ensure_future(queue.decode([one], OPTIONS[3], seconds=seconds)) for _ in range(n)]


async def is_done_first(one: Awaitable[object], others: list[asyncio.Task[Any]]) -> bool:
    """Whether one call is done before others; asked of their order, because a slow test sees several done at once."""
    task, order = asyncio.ensure_future(one), list[asyncio.Task[Any]]()
    for each in (task, *others):
        each.add_done_callback(order.append)
    assert await task
    return order[0] is task


CHEAP, COSTLY = DecodingInput((0,), [5, 6], 3), DecodingInput((0,), [7] * 30, 30)


@both
@pytest.mark.parametrize(
    ("caller", "one", "seconds", "is_first"),
    [
        ("a", CHEAP, 50, True),
        ("a", COSTLY, math.inf, False),
        ("a", COSTLY, 50, False),  # a deadline buys no precedence
        ("b", COSTLY, math.inf, True),
    ],
)
def test_work_is_shared_by_cost_between_callers_and_their_calls(
    make: Make, caller: str, one: DecodingInput, seconds: float, is_first: bool
) -> None:
    async def work(queue: DecodingQueue) -> None:
        many = start_as("a", 150, queue, COSTLY, math.inf)  # more than are decoded at once
        await asyncio.sleep(0)
        (late,) = start_as(caller, 1, queue, one, seconds)
        await late
        n_done = sum(task.done() for task in many)
        assert n_done < 75 if is_first else n_done > 75
        for task in many:
            task.cancel()

    run(work, make(1))


@both
def test_closing_ends_all_calls_and_takes_no_more(make: Make) -> None:
    async def main() -> None:
        async with opened(make(1)) as queue:
            tasks = [asyncio.ensure_future(queue.decode([LONG] * 3, OPTIONS[2])) for _ in range(3)]
            await asyncio.sleep(0)
            assert queue.workload()["n_open"] == 9
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in found} <= {QueueClosedError, list} and isinstance(found[-1], QueueClosedError)
        with pytest.raises(QueueClosedError):
            await queue.decode(inputs(1), OPTIONS[0])

    asyncio.run(main())


def test_an_input_that_is_refused_leaves_nothing_behind() -> None:
    async def work(queue: DecodingQueue) -> None:
        with pytest.raises(SettingsError, match="ids"):
            await queue.decode([DecodingInput((0,), [9], 5), DecodingInput((0,), [90], 5)], OPTIONS[0])
        assert queue.workload()["n_open"] == 0
        assert await queue.decode([DecodingInput((0,), [9], 5)], OPTIONS[0])

    run(work, native())


def test_a_cheap_call_needs_no_room_among_costly_ones() -> None:
    async def work(queue: DecodingQueue) -> None:
        many = start_as("a", 30, queue, LONG, math.inf)  # more than are decoded at once
        await asyncio.sleep(0)
        assert await is_done_first(queue.decode([CHEAP], OPTIONS[3]), many)
        for task in many:
            task.cancel()

    run(work, native(1))


def test_long_sources_are_not_encoded_while_a_short_one_should_be_done_first() -> None:
    async def work(queue: DecodingQueue) -> None:
        short = asyncio.ensure_future(queue.decode([LONG], OPTIONS[3]))
        await asyncio.sleep(0)
        long = start_as("a", 5, queue, DecodingInput((0,), [7] * 3000, 1), math.inf)
        assert await is_done_first(short, long)
        await asyncio.gather(*long)

    run(work, native(1))


def test_a_costly_call_does_not_starve() -> None:
    """Cheaper calls keep coming; their caller's share is used up before the costly one is done."""

    async def work(queue: DecodingQueue) -> None:
        async def keep_asking() -> None:
            while True:
                await queue.decode([replace(COSTLY, limit=5)], OPTIONS[3])

        tasks = [asyncio.ensure_future(keep_asking()) for _ in range(60)]  # more than are decoded at once
        await asyncio.sleep(0)
        assert await queue.decode([replace(COSTLY, limit=40)], OPTIONS[3])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(work, native(1))


def test_event_loops_and_threads_decode_at_the_same_time() -> None:
    engine = native(2)
    asked = inputs(25, seed=4)
    expected = {o: engine.translate(asked, o) for o in OPTIONS}
    problems: list[object] = []

    async def use_queue(pick: random.Random) -> None:
        async with opened(engine) as queue:
            for _ in range(4):
                options, chosen = pick.choice(OPTIONS), pick.sample(range(len(asked)), 12)
                seconds = [pick.choice([0.0, 0.003, 60.0, 60.0]) for _ in chosen]
                tasks = [
                    asyncio.ensure_future(queue.decode([asked[i]], options, seconds=s))
                    for i, s in zip(chosen, seconds, strict=True)
                ]
                await asyncio.sleep(0)
                pick.choice(tasks).cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                done = [(i, one) for i, one in zip(chosen, found, strict=True) if isinstance(one, list)]
                problems.extend(i for i, one in done if one != [expected[options][i]])

    def use(seed: int) -> None:
        pick = random.Random(seed)
        for _ in range(3):
            options = pick.choice(OPTIONS)
            if engine.translate(asked, options) != expected[options]:
                problems.append(options)
            asyncio.run(use_queue(pick))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not problems


def test_threads_end_with_their_engine() -> None:
    def n_threads() -> int:
        return sum(thread.name == "decode" for thread in threading.enumerate())

    gc.collect()
    before = n_threads()
    engine = native(2)
    engine.translate(inputs(4), OPTIONS[0])
    assert n_threads() == before + 2
    del engine
    gc.collect()
    assert n_threads() == before


def test_a_call_ends_soon_after_an_interrupt_and_leaves_nothing_behind() -> None:
    engine = native(1)
    asked = [DecodingInput((i,), [7] * 20, 400) for i in range(600)]
    engine.translate(asked[:1], OPTIONS[4])
    load = engine.workload  # type: ignore[attr-defined]
    per_batch = load()["n_steps"]  # of 4 inputs, which is as many as are decoded at once

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
    assert load()["n_steps"] < 100 * per_batch, "most inputs were never decoded"
    assert engine.translate(asked[:1], OPTIONS[0])


def test_a_forked_process_translates_with_threads_of_its_own() -> None:
    engine = native(2)
    expected: list[list[Hypothesis]] = engine.translate(inputs(8), OPTIONS[2])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if engine.translate(inputs(8), OPTIONS[2]) == expected else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.translate(inputs(8), OPTIONS[2]) == expected
