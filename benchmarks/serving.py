"""The service under load, on loopback: throughput, latency, overload, leaks, shutdown, malformed requests.

    python benchmarks/serving.py all --run RUN --text test.en             # the numbers of docs/serving.md
    python benchmarks/serving.py mixed shutdown --run RUN --text test.en --scale 0.01

RUN is a run folder that translates; the text has one sentence per line. The server is `transduce serve` in a process of
its own with the options after `--serve`. `--scale` multiplies numbers of requests and seconds. Exit code 1: a property
does not hold (a wrong answer, a lost request, an error 5xx, growing memory, a hang).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from memory import Sample, judge, resident

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


from http_load import Connection, Load, LostError, Outcome, percentile, request
from malformed import malformed
from servers import Server
from transduce import TranslationOptions, Translator
from transduce.convert.exporting import export_run
from transduce.text.sentences import split_sentences

CLIENTS = 64
BEAMS = (1, 2, 4)
HANG = 60.0  # seconds without an answer
TRANSLATE = "/v1/translate"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served and asked for. expected: the offline translations by beam."""

    run: Path
    lines: list[str]
    expected: dict[int, list[str]]
    serve: list[str]
    scale: float

    def times(self, n: int, least: int) -> int:
        """A number of requests, scaled."""
        return max(least, round(n * self.scale))

    @contextmanager
    def server(self) -> Iterator[Server]:
        """A server, whose log must have no traceback; killed if it does not end."""
        server = Server(f"en-de={self.run}", *self.serve)
        try:
            yield server
        finally:
            if server.process.poll() is None and server.stop() != 0:
                print(f"FAILED: the server ended with {server.process.returncode}")
        if any("Traceback" in line for line in server.log):
            raise SystemExit("FAILED: a traceback in the log:\n" + "".join(server.log[-40:]))

    def single(self, number: int) -> bytes:
        """A request for one sentence with the run's beam."""
        return request(TRANSLATE, {"text": self.lines[number % len(self.lines)], "split": False})


def report(name: str, text: str, *, good: bool = True) -> bool:
    """Print a line of results."""
    print(f"{name}: {text}{'' if good else '  FAILED'}", flush=True)
    return good


# Numbers 1 to 3: speed


def throughput(setup: Setup) -> bool:
    """Sentences per second with 64 clients, and of `transduce translate` with the same sentences."""
    n = setup.times(20_000, 1000)
    offline, offline_cpu = offline_speed(setup)
    with setup.server() as server:
        began = cpu_seconds(server.process.pid)
        speed, p50, p99 = saturate(setup, server.port, n)
        cpu = (cpu_seconds(server.process.pid) - began) / (n + n // 10)
    text = (
        f"{speed:,.0f} sentences/s with {CLIENTS} clients (p50 {p50:.0f} ms, p99 {p99:.0f} ms); transduce translate "
        f"{offline:,.0f}; ratio {speed / offline:.2f}; CPU ms {1000 * cpu:.2f} and {1000 * offline_cpu:.2f}"
    )
    report("throughput", text)
    for kind in ("threads", "one"):
        plain_throughput(setup, kind, min(n, 2000))
    return True


def plain_throughput(setup: Setup, kind: str, n: int) -> None:
    """Of a server of `plain_servers.py`, whose answers may differ: they are CTranslate2's."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        list(export_run(setup.run, "ctranslate2", Path(name) / "model"))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        script = Path(__file__).with_name("plain_servers.py")
        command = [sys.executable, script, kind, setup.run, Path(name) / "model", port]
        server = subprocess.Popen(list(map(str, command)))
        try:
            load = Load(port, setup.single)
            while not load.outcomes:
                time.sleep(0.2)
                uvloop.run(load.clients(1, iter(range(1))))
            speed, p50, p99 = saturate(setup, port, n, compare=False)
        finally:
            server.terminate()
            server.wait()
    report(f"plain server, {kind}", f"{speed:,.0f} sentences/s (p50 {p50:.0f} ms, p99 {p99:.0f} ms)")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def offline_speed(setup: Setup) -> tuple[float, float]:
    """Sentences per second of the command, and CPU seconds per sentence.

    Without the time in which it starts: from the times for all lines and for a tenth. Each line occurs once, as the
    command translates repeated lines once.
    """
    seconds, cpu, few = [], [], len(setup.lines) // 10
    with tempfile.TemporaryDirectory() as name:
        for n in (few, len(setup.lines)):
            path, out = (Path(name) / f"{kind}{n}" for kind in ("lines", "out"))
            path.write_text("".join(f"{line}\n" for line in setup.lines[:n]))
            command = [sys.executable, "-m", "transduce", "translate", setup.run, path, "-o", out]
            precision = [o for o in setup.serve if o.startswith("--precision=")]
            began, used = time.monotonic(), os.times()
            subprocess.run([*map(str, command), *precision], check=True, stderr=subprocess.DEVNULL)
            seconds.append(time.monotonic() - began)
            now = os.times()
            cpu.append(now.children_user + now.children_system - used.children_user - used.children_system)
    n = len(setup.lines) - few
    return n / (seconds[1] - seconds[0]), (cpu[1] - cpu[0]) / n


def saturate(setup: Setup, port: int, n: int, *, compare: bool = True) -> tuple[float, float, float]:
    """Sentences per second of 64 clients, after a tenth of the requests; median and p99 in milliseconds."""
    load = Load(port, setup.single)
    uvloop.run(load.clients(CLIENTS, iter(range(n + n // 10))))
    if compare:
        check_answers(setup, load.outcomes)
    elif failed := [one for one in load.outcomes if one.status != 200]:
        raise SystemExit(f"FAILED: {len(failed)} of {len(load.outcomes)} requests, with status {failed[0].status}")
    ends = sorted(one.sent + one.seconds for one in load.outcomes)[n // 10 :]
    times = [1000 * one.seconds for one in load.outcomes[n // 10 :]]
    return (len(ends) - 1) / (ends[-1] - ends[0]), percentile(times, 0.5), percentile(times, 0.99)


def latency(setup: Setup) -> bool:
    """p50 and p99 at half of the throughput, compared with one client alone."""
    n = setup.times(5000, 500)
    with setup.server() as server:
        speed, *_ = saturate(setup, server.port, n)
        alone, half = Load(server.port, setup.single), Load(server.port, setup.single)
        uvloop.run(alone.clients(1, iter(range(min(n, len(setup.lines))))))
        uvloop.run(half.at_rate(speed / 2, 2 * n / speed))
        check_answers(setup, half.outcomes)
    one = statistics.median(1000 * o.seconds for o in alone.outcomes)
    times = [1000 * o.seconds for o in half.outcomes]
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    text = f"at {speed / 2:,.0f} sentences/s p50 {p50:.1f} ms, p99 {p99:.1f} ms; one client alone {one:.1f} ms"
    return report("latency", f"{text}; p99 is {p99 / one:.1f} times that")


def overload(setup: Setup) -> bool:
    """Ten times the capacity for 60 s."""
    n, seconds = setup.times(5000, 500), max(60 * setup.scale, 3.0)
    with setup.server() as server, watch_memory(server) as memory:
        speed, _, saturated = saturate(setup, server.port, n)
        load = Load(server.port, setup.single)
        uvloop.run(load.at_rate(10 * speed, seconds))
        accepted = check_answers(setup, load.outcomes, allowed=(200, 429, 504))
        first, last = memory[len(memory) // 2].resident, memory[-1].resident
    refused = [1000 * o.seconds for o in load.outcomes if o.status == 429]
    count = Counter(o.status for o in load.outcomes)
    p99 = percentile([1000 * o.seconds for o in accepted], 0.99)
    rate = len(load.outcomes) / seconds
    text = (
        f"{rate:,.0f} requests/s at a capacity of {speed:,.0f}: {dict(count)}; accepted: p99 {p99:,.0f} ms "
        f"({saturated:,.0f} ms at saturation); refused: p99 {percentile(refused or [0.0], 0.99):.0f} ms; memory "
        f"{first >> 20} to {last >> 20} MiB"
    )
    return report("overload", text, good=count[504] < len(accepted) / 100)


def check_answers(setup: Setup, outcomes: list[Outcome], allowed: tuple[int, ...] = (200,)) -> list[Outcome]:
    """The answers with status 200, which are those of the offline translation; another status ends the program."""
    accepted = []
    for one in outcomes:
        if one.status not in allowed:
            raise SystemExit(f"FAILED: request {one.number} got status {one.status}: {one.body[:300]!r}")
        if one.status == 200:
            accepted.append(one)
            text = json.loads(one.body)["translations"][0]["text"]
            expected = setup.expected[0][one.number % len(setup.lines)]
            if text != expected:
                raise SystemExit(f"FAILED: request {one.number} got {text!r} instead of {expected!r}")
    return accepted


# Number 4: 200,000 requests


@dataclass(slots=True)
class Mixed:
    """Clients that ask for 1 to 6 sentences with several beams; a fifth leave, and some send what is malformed."""

    setup: Setup
    count: Counter[str]
    n_done: int = 0

    async def client(self, port: int, numbers: Iterator[int]) -> None:
        connection = Connection(port)
        for number in numbers:
            draw = random.Random(f"mixed {number}")
            kind = draw.choices(("answered", "left", "malformed"), (75, 20, 5))[0]
            await asyncio.wait_for(getattr(self, f"_{kind}")(connection, number, draw), HANG)
            self.count[kind] += 1
            self.n_done += 1
        connection.close()

    def _request(self, draw: random.Random) -> tuple[bytes, list[str]]:
        beam = draw.choice(BEAMS)
        places = [draw.randrange(len(self.setup.lines)) for _ in range(min(draw.randrange(1, 7), draw.randrange(1, 7)))]
        body = {"text": [self.setup.lines[place] for place in places], "beam": beam, "split": False}
        return request(TRANSLATE, body), [self.setup.expected[beam][place] for place in places]

    async def _answered(self, connection: Connection, number: int, draw: random.Random) -> None:
        data, expected = self._request(draw)
        try:
            answer = await connection.ask(data)
        except LostError as error:
            raise SystemExit(f"FAILED: request {number}: {error}") from None
        if answer.status != 200:
            raise SystemExit(f"FAILED: request {number}: {answer.status} {answer.body[:300]!r}")
        found = [one["text"] for one in answer.json()["translations"]]
        if found != expected:
            raise SystemExit(f"FAILED: request {number}: {found} instead of {expected}")

    async def _left(self, connection: Connection, number: int, draw: random.Random) -> None:
        data, _ = self._request(draw)
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))]
        await connection.send(data)
        await asyncio.sleep(draw.choice((0.0, 0.001, 0.01, 0.03)))
        connection.close(reset=draw.random() < 0.5)

    async def _malformed(self, connection: Connection, number: int, draw: random.Random) -> None:
        other = Connection(connection.port)
        answer = await other.ask(malformed(number))
        other.close()
        if not (200 <= answer.status < 500):
            raise SystemExit(f"FAILED: malformed request {number}: {answer.status} {answer.body[:300]!r}")


@contextmanager
def watch_memory(server: Server, done: Callable[[], int] = lambda: 0) -> Iterator[list[Sample]]:
    """Samples of the server's resident memory, five per second."""
    samples, stop, began = list[Sample](), threading.Event(), time.monotonic()

    def run() -> None:
        while not stop.wait(0.2):
            samples.append(Sample(time.monotonic() - began, resident(server.process.pid), done()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def mixed(setup: Setup) -> bool:
    """200,000 requests of mixed sizes with disconnects and malformed bodies: answers, memory, hangs."""
    n, state = setup.times(200_000, 500), Mixed(setup, Counter())

    async def run(port: int) -> None:
        numbers = iter(range(n))
        await asyncio.gather(*(state.client(port, numbers) for _ in range(CLIENTS)))
        await idle(port)

    with setup.server() as server, watch_memory(server, lambda: state.n_done) as samples:
        began = time.monotonic()
        uvloop.run(run(server.port))
        seconds = time.monotonic() - began
    text = f"{n:,} requests in {seconds:,.0f} s: {dict(state.count)}; all answers are the offline translation's"
    if n < 20_000:
        return report("mixed", f"{text}; too few to judge memory ({samples[-1].resident >> 20} MiB)")
    row, flat = judge("mixed", samples)
    return report("mixed", f"{text}; memory {row}", good=flat)


async def idle(port: int) -> None:
    """Wait until the service says that nothing is pending, and that it still translates."""
    connection, end = Connection(port), time.monotonic() + HANG
    names = ("transduce_pending_requests", "transduce_pending_tokens", "transduce_open_sentences")
    while True:
        page = (await connection.ask(request("/metrics", method="GET"))).body.decode()
        values = [float(v) for name in names for v in re.findall(rf"^{name}\S* (\S+)$", page, re.MULTILINE)]
        if not any(values):
            break
        if time.monotonic() > end:
            raise SystemExit(f"FAILED: after the load, requests, tokens and sentences are pending: {values}")
        await asyncio.sleep(0.05)
    answer = await connection.ask(request(TRANSLATE, {"text": "1"}))
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"FAILED: after the load: {answer.status} {answer.body[:300]!r}")


# Number 5: signals


def shutdown(setup: Setup) -> bool:
    """SIGTERM 50 times within the load of 16 clients: no request that was sent before it is lost."""
    n, total, lost = setup.times(50, 3), Counter[str](), 0
    for round_ in range(n):
        with setup.server() as server:
            outcomes, stopped, code = uvloop.run(_terminated(setup, server, random.Random(round_).uniform(0.05, 0.5)))
        check_answers(setup, outcomes, allowed=(0, 200, 503))
        lost += sum(o.partial or (o.status == 0 and o.sent < stopped) for o in outcomes) + (code != 0)
        total.update(str(o.status) for o in outcomes)
    text = f"{n} times; answers by status (0: sent later, and not read): {dict(total)}; lost: {lost}"
    return report("SIGTERM", text, good=not lost)


async def _terminated(setup: Setup, server: Server, seconds: float) -> tuple[list[Outcome], float, int]:
    load = Load(server.port, setup.single)
    clients = asyncio.create_task(load.clients(16, itertools.count()))
    await asyncio.sleep(seconds)
    stopped = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(clients, HANG)
    return load.outcomes, stopped, await asyncio.to_thread(server.process.wait, 40)


def restart(setup: Setup) -> bool:
    """kill -9 within load, and the time until a new server on the same port is ready."""
    seconds = []
    with setup.server() as first:
        port = first.port
        for _ in range(setup.times(10, 2)):
            uvloop.run(_killed(setup, first))
            began = time.monotonic()
            first = Server(f"en-de={setup.run}", *setup.serve, port=port)
            status, _ = first.request("/ready")
            seconds.append(time.monotonic() - began)
            assert status == 200
        first.stop()
    text = f"ready after {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
    return report("kill -9", text)


async def _killed(setup: Setup, server: Server) -> None:
    load = Load(server.port, setup.single)
    clients = asyncio.create_task(load.clients(16, itertools.count()))
    await asyncio.sleep(0.3)
    server.process.kill()
    await asyncio.wait_for(clients, HANG)
    await asyncio.to_thread(server.process.wait)


# Number 6: malformed requests


def malformed_requests(setup: Setup) -> bool:
    """10,000 malformed requests: always a 4xx with one line."""
    n, count = setup.times(10_000, 200), Counter[int]()

    async def client(port: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            connection = Connection(port)
            answer = await asyncio.wait_for(connection.ask(malformed(number)), HANG)
            connection.close()
            count[answer.status] += 1
            if not (answer.status == 200 or (400 <= answer.status < 500 and b"\n" not in answer.body)):
                raise SystemExit(f"FAILED: malformed request {number}: {answer.status} {answer.body[:300]!r}")

    async def run(port: int) -> None:
        numbers = iter(range(n))
        await asyncio.gather(*(client(port, numbers) for _ in range(8)))
        await idle(port)

    with setup.server() as server:
        uvloop.run(run(server.port))
    return report("malformed", f"{n:,} requests: {dict(sorted(count.items()))} (200: the damage was harmless)")


COMMANDS: dict[str, Callable[[Setup], bool]] = {
    "throughput": throughput, "latency": latency, "overload": overload, "mixed": mixed, "shutdown": shutdown,
    "restart": restart, "malformed": malformed_requests,
}  # fmt: skip


def main() -> None:
    """Translate offline, then run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=[*COMMANDS, "all"])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1000, help="sentences to use; throughput needs 1,000")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--serve", nargs="*", default=[], metavar="--OPTION=VALUE", help="of transduce serve")
    args = parser.parse_args()
    lines = list(dict.fromkeys(args.text.read_text().splitlines()))
    lines = [line for line in lines if len(split_sentences(line, "en")) == 1][: args.lines]
    precision = dict(o.removeprefix("--").split("=") for o in args.serve).get("precision", "auto")
    translator = Translator.load(args.run, precision=precision)
    expected = {
        beam: [one.text for one in translator.translate(lines, TranslationOptions(beam=beam or None))]
        for beam in (0, *BEAMS)  # 0: the run's
    }
    del translator
    setup = Setup(args.run, lines, expected, args.serve, args.scale)
    names = list(COMMANDS) if "all" in args.commands else args.commands
    good = [COMMANDS[name](setup) for name in names]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
