"""What a service refuses, and API keys."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from transduce.decoding.options import TranslationOptions
from transduce.errors import SettingsError
from transduce.serving.keys import ApiKeys, UnauthorizedError, new_key
from transduce.serving.limits import Admission, ExpiredError, Limits, OverloadedError


def test_requests_and_tokens_beyond_the_limits_are_refused_until_others_end() -> None:
    now = 0.0
    admission = Admission(Limits(max_requests=2, max_tokens=100), clock=lambda: now)
    with ExitStack() as stack:
        stack.enter_context(admission.request())
        stack.enter_context(admission.tokens(90))
        with admission.request(), pytest.raises(OverloadedError, match="too much text"), admission.tokens(11):
            pass
        with admission.request(), admission.tokens(10), pytest.raises(OverloadedError, match="too many requests"):
            stack.enter_context(admission.request())
    assert (admission.n_requests, admission.n_tokens) == (0, 0)
    with admission.tokens(1000):  # alone, however long: the limits of a request are others
        pass


def test_requests_are_refused_while_what_waits_takes_too_long() -> None:
    now = 0.0
    admission = Admission(Limits(max_wait=4, batch_tokens=4000), clock=lambda: now)
    with admission.tokens(5000), admission.request():
        assert admission.overloaded("").retry_after == 1  # nothing has ended yet
        now = 10.0  # 500 tokens per second
    now = 200.0  # nothing to do: does not count
    with admission.tokens(100):  # a small batch: neither do 100 tokens in 10 seconds
        now = 210.0
    with admission.request(), admission.tokens(8000):
        now = 226.0
        with pytest.raises(KeyError), admission.tokens(1000):
            assert admission.overloaded("").retry_after == 18
            with pytest.raises(OverloadedError, match="takes too long"), admission.request():
                pass
            raise KeyError  # cancelled: says nothing of the speed
    with admission.tokens(7900), admission.request():  # one batch that runs and one that waits, however long they take
        assert admission.overloaded("").retry_after > 4


def test_generation_is_refused_if_it_cannot_end_in_time() -> None:
    now = 0.0
    admission = Admission(Limits(max_wait=1, batch_tokens=1000, max_tokens=8000), clock=lambda: now)
    with admission.generation(4000, seconds=10):
        now = 8.0  # 500 tokens per second
    with admission.generation(9000, seconds=10), admission.request():  # alone; translations do not wait for it
        pass
    with admission.generation(4000, seconds=10), admission.generation(1000, seconds=10):
        with pytest.raises(OverloadedError, match="being generated"), admission.generation(1, seconds=10):
            pass
        with pytest.raises(OverloadedError, match="too much text"), admission.tokens(3001):
            pass
        assert admission.overloaded("").retry_after == 10 and admission.n_tokens == 5000


class Simulation:
    """Clients that always ask for a text of the same length, again when it ends, or half a second after a refusal."""

    def __init__(self, n_clients: int, n_tokens: int, speed: float, *, in_turn: bool = False) -> None:
        """`speed`: tokens per second. `in_turn`: texts are finished one after another, as translations are nearly."""
        self.now, self._n_tokens, self._speed, self._in_turn = 0.0, n_tokens, speed, in_turn
        self.admission = Admission(Limits(batch_tokens=4000, max_requests=10_000), clock=lambda: self.now)
        self._free = [0.0] * n_clients  # the times at which clients ask
        self._running: list[tuple[AbstractContextManager[None], float, list[float]]] = []  # its end, and what is left
        self.n_done = self.n_refused = self.n_expired = 0

    def run(self, until: float) -> None:
        while self.now < until:
            for _ in range(sum(time <= self.now for time in self._free)):
                self._free.remove(min(self._free))
                self._ask()
            n = 1 if self._in_turn else len(self._running)
            times = [self.now + left[0] * n / self._speed for _, _, left in self._running[:n]]
            after = min(times + [end for _, end, _ in self._running] + self._free)
            for _, _, left in self._running[:n]:
                left[0] -= (after - self.now) * self._speed / n
            self.now = after
            self._end()

    def _ask(self) -> None:
        work = self.admission.tokens(self._n_tokens)
        if not self._in_turn:
            work = self.admission.generation(self._n_tokens, seconds=10)
        try:
            if self._in_turn and (error := self.admission.refusal()) is not None:
                raise error
            work.__enter__()
            self._running.append((work, self.now + 10, [self._n_tokens]))
        except OverloadedError:
            self.n_refused += 1
            self._free.append(self.now + 0.5)

    def _end(self) -> None:
        for one in list(self._running):
            work, end, (left,) = one
            if left < 1e-6:
                work.__exit__(None, None, None)
                self.n_done += 1
            elif end <= self.now:
                error = ExpiredError()
                work.__exit__(ExpiredError, error, None)
                self.n_expired += 1
            else:
                continue
            self._running.remove(one)
            self._free.append(self.now)


@pytest.mark.parametrize(("n_clients", "n_tokens", "speed"), [(8, 1100, 2000), (16, 300, 5000), (32, 1100, 4000)])
def test_texts_that_can_end_in_time_are_not_refused(n_clients: int, n_tokens: int, speed: float) -> None:
    simulation = Simulation(n_clients, n_tokens, speed)
    simulation.run(100)
    assert simulation.n_refused == simulation.n_expired == 0 and simulation.n_done * n_tokens > 90 * speed
    assert simulation.admission._generation.seconds(1000) == pytest.approx(
        (simulation.admission.n_tokens + 1000) / speed, rel=0.01
    )


@pytest.mark.parametrize(("n_clients", "n_tokens", "speed"), [(40, 1100, 2000), (100, 300, 2000), (60, 64, 200)])
def test_so_many_texts_are_generated_as_can_end_in_time(n_clients: int, n_tokens: int, speed: float) -> None:
    simulation = Simulation(n_clients, n_tokens, speed)
    simulation.run(100)
    simulation.n_done = simulation.n_expired = 0
    simulation.run(200)
    assert simulation.n_refused and simulation.n_done * n_tokens > 90 * speed, vars(simulation)


def test_translations_wait_no_longer_than_the_limit() -> None:
    simulation = Simulation(400, 100, 10_000, in_turn=True)
    simulation.run(20)
    assert simulation.n_refused and not simulation.n_expired
    assert simulation.n_done > 0.99 * 20 * 100
    assert simulation.admission._translation.seconds(1000) == pytest.approx(
        (simulation.admission.n_tokens + 1000) / 10_000, rel=0.05
    )


def test_limits_of_a_request() -> None:
    limits = Limits(max_texts=2, max_characters=10, max_beam=4)
    limits.check_texts(["12345", "12345"])
    for texts, message in ((["a"] * 3, "3 texts"), (["a" * 11], "11 characters")):
        with pytest.raises(SettingsError, match=message):
            limits.check_texts(texts)
    with pytest.raises(SettingsError, match="beam = 5"):
        limits.check_options(TranslationOptions(beam=5))


def test_keys_are_stored_as_hashes_and_limited(tmp_path: Path) -> None:
    secret, line = new_key("alice")
    assert secret not in line
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\n{line} 2\n{new_key('bob')[1]}\n", encoding="utf-8")
    now = 1000.0
    keys = ApiKeys.load(file)
    keys._clock = lambda: now
    for wrong in (None, "", "x", secret[:-1], "\ud800"):
        with pytest.raises(UnauthorizedError):
            keys.check(wrong)
    assert [keys.check(secret), keys.check(secret)] == ["alice"] * 2
    with pytest.raises(OverloadedError) as refused:
        keys.check(secret)
    assert refused.value.retry_after == pytest.approx(30)
    now += 31
    assert keys.check(secret) == "alice"


@pytest.mark.parametrize(
    "content", ["", "alice\n", "alice 00\n", f"a {'0' * 64} x\n", f"a {'0' * 64} 1 2\n", f"a {'0' * 64} 0\n"]
)
def test_damaged_key_files(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match="keys"):
        ApiKeys.load(tmp_path / "keys")


@pytest.mark.parametrize("name", ["", "a b", "#x"])
def test_names_of_keys(name: str) -> None:
    with pytest.raises(SettingsError, match="one word"):
        new_key(name)
