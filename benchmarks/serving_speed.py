"""Throughput, latency and overload of the service: numbers 1 to 3 of serving.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from http_load import Load, percentile
from serving_setup import CLIENTS, Setup, check_answers, report, watch_memory

from transduce.convert.exporting import export_run


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
    if find_spec("fastapi") is None:
        return report("plain server", "skipped: FastAPI is not installed; pip install fastapi")
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
            while not load.outcomes and server.poll() is None:
                time.sleep(0.2)
                load.clients(1, iter(range(1)))
            if not load.outcomes:
                raise SystemExit(f"FAILED: plain_servers.py ended with exit code {server.returncode}")
            began = cpu_seconds(server.pid)
            speed, p50, p99 = saturate(setup, port, n, compare=False)
            cpu = (cpu_seconds(server.pid) - began) / (n + n // 10)
        finally:
            server.terminate()
            server.wait()
    text = f"{speed:,.0f} sentences/s (p50 {p50:.0f} ms, p99 {p99:.0f} ms); CPU ms {1000 * cpu:.2f}"
    report(f"plain server with FastAPI, {kind}", text)


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
    load.clients(CLIENTS, iter(range(n + n // 10)))
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
        alone.clients(1, iter(range(min(n, len(setup.lines)))))
        half.at_rate(speed / 2, 2 * n / speed)
        check_answers(setup, half.outcomes)
    (one, one_99), (p50, p99) = (
        (percentile(times, 0.5), percentile(times, 0.99))
        for times in ([1000 * o.seconds for o in load.outcomes] for load in (alone, half))
    )
    text = (
        f"at {speed / 2:,.0f} sentences/s p50 {p50:.1f} ms, p99 {p99:.1f} ms; one client alone p50 {one:.1f} ms, p99 "
        f"{one_99:.1f} ms; p99 is {p99 / one:.1f} times the p50 of one client, {p99 / one_99:.1f} times its p99"
    )
    return report("latency", text)


def overload(setup: Setup) -> bool:
    """Ten times the capacity for 60 s: whatever is not translated must be refused."""
    n, seconds = setup.times(5000, 500), max(60 * setup.scale, 3.0)
    with setup.server() as server:
        speed, _, saturated = saturate(setup, server.port, n)
        load = Load(server.port, setup.single)
        with watch_memory(server) as memory:
            load.at_rate(10 * speed, seconds)
    accepted = [1000 * o.seconds for o in check_answers(setup, load.outcomes, allowed=(200, 429))]
    refused = [1000 * o.seconds for o in load.outcomes if o.status == 429] or [0.0]
    late, rate = len([t for t in refused if t > 50]), len(load.outcomes) / seconds
    first, last = memory[len(memory) // 4].resident, memory[-1].resident
    text = (
        f"{rate:,.0f} requests/s, {rate / speed:.1f} times the capacity of {speed:,.0f}; accepted: "
        f"{len(accepted) / seconds:,.0f} per second, p99 {percentile(accepted, 0.99):,.0f} ms ({saturated:,.0f} ms at "
        f"saturation); refused: p99 {percentile(refused, 0.99):.1f} ms, {late / len(refused):.2%} after 50 ms; memory "
        f"{first >> 20} to {last >> 20} MiB"
    )
    return report("overload", text)
