"""Language models in a service: the texts are those of `Generator`, alone and together, up to a stop string."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import text_runs
from transduce import DecodingOptions, Generator
from transduce.decoding.queue import ExpiredError
from transduce.errors import DataError
from transduce.kernels.library import load_library
from transduce.serving.access import Admission, Limits, OverloadedError
from transduce.serving.async_models import AsyncTextGenerator, Completions, in_parts

pytestmark = pytest.mark.anyio
PROMPTS = ["Der Hund 😀", ""]
OPTIONS = DecodingOptions(max_length=44, sample=True, temperature=1.2, top_k=50, top_p=0.95, seed=7)  # context 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("runs")
    return {
        "gpt": text_runs.make_run(path / "gpt", **text_runs.GPT),
        "transformer-xl": text_runs.make_run(path / "xl", kind="transformer-xl", memory_length=8),
    }


@pytest.fixture(params=["native", "torch"])
def generator(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Generator:
    if request.param == "native" and isinstance(load_library(), str):
        pytest.skip("no native library")
    return Generator.load(runs["gpt" if request.param == "native" else "transformer-xl"], device="cpu")


@asynccontextmanager
async def served(generator: Generator, admission: Admission | None = None) -> AsyncIterator[AsyncTextGenerator]:
    """The generator in this event loop, for a minute at most."""
    model = AsyncTextGenerator(generator, admission or Admission(Limits()))
    async with asyncio.timeout(60):
        try:
            await model.warm_up()
            yield model
        finally:
            await model.close()


async def test_texts_are_those_of_the_generator(generator: Generator) -> None:
    expected = generator.generate(PROMPTS, OPTIONS.model_copy(update={"n_best": 2}))
    alone = generator.generate(PROMPTS[1:2], OPTIONS)[0]
    async with served(generator) as model:
        together, other = await asyncio.gather(
            model.generate(PROMPTS, OPTIONS.model_copy(update={"n_best": 2})), model.generate(PROMPTS[1:2], OPTIONS)
        )
        assert [(one.text, one.ids) for one in together.texts] == [(one.text, one.ids) for one in expected]
        assert (other.texts[0].text, other.texts[0].finished, other.n_prompt) == (alone.text, alone.finished, 1)
        assert together.n_new == sum(len(one.ids) for one in expected) and max(len(one.ids) for one in expected) > 40


async def test_a_stop_string_ends_a_text(generator: Generator) -> None:
    whole = [one.text for one in generator.generate(PROMPTS, OPTIONS)]
    stop = [text[len(text) // 2 : len(text) // 2 + 2] for text in whole]
    async with served(generator) as model:
        found = await model.generate(PROMPTS, OPTIONS, stop=stop)
        for one, text in zip(found.texts, whole, strict=True):
            assert one.text == text[: min(place for s in stop if (place := text.find(s)) >= 0)]
            assert one.finished and generator.tokenizer.decode(one.ids).startswith(one.text)
        assert model.queue.workload()["n_open"] == 0 or not isinstance(load_library(), str)


async def test_limits_and_callers_that_leave(runs: dict[str, Path]) -> None:
    generator = Generator.load(runs["gpt"], device="cpu")
    admission = Admission(Limits(max_tokens=250))
    async with served(generator, admission) as model:
        with pytest.raises(ExpiredError):
            await model.generate(PROMPTS, OPTIONS, end=0.0)
        with pytest.raises(DataError, match="prompt 2 has"):
            await model.generate(["", "x y " * 30], OPTIONS)
        calls = [asyncio.ensure_future(model.generate(PROMPTS, OPTIONS)) for _ in range(4)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found[0], Completions) and isinstance(found[-1], OverloadedError)
        stream = in_parts(lambda on_part: model.generate(PROMPTS, OPTIONS, on_part=on_part))
        task = asyncio.ensure_future(model.generate(PROMPTS, OPTIONS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in stream:
            break
        await stream.aclose()
        assert admission.n_tokens == 0
