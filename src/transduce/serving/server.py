"""The HTTP server. It runs granian in the event loop of the service, and handles signals, reloads and shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import ssl
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.common import SSLProtocols
from granian.server.embed import Server
from starlette.types import ASGIApp

from transduce.errors import SettingsError, TransduceError, listed
from transduce.logging import Log
from transduce.process import handle_signals
from transduce.serving.access import NO_KEYS, ApiKeys
from transduce.serving.app import log_request, make_app
from transduce.serving.async_models import AsyncTextGenerator
from transduce.serving.service import Service

if TYPE_CHECKING:
    from transduce.serving.inspection_page import InspectionPage

try:
    from uvloop import new_event_loop as _loop_factory
except ImportError:  # Windows
    _loop_factory = asyncio.new_event_loop  # type: ignore[assignment]

_BACKLOG = 4096
_PAIRS = 8  # maximum language pairs of a run that are printed
_HEAD_BYTES = 1 << 15  # a request with longer headers gets status 431
_MOST_CONNECTIONS = 1024
_LAST_SECONDS = 2.0  # seconds for clients to read the last responses


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address and options of the server.

    host: The default can be reached from this machine only. port: 0 takes a free port. cors: Origins whose pages may
    use the service from a browser. log_text: Log requests with their texts. watch: Seconds between checks for changed
    run folders (0: reload on SIGHUP only). certificate, certificate_key: PEM files, for TLS.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    keys: ApiKeys = NO_KEYS
    cors: tuple[str, ...] = ()
    log: bool = True
    log_text: bool = False
    watch: float = 0.0
    certificate: Path | None = None
    certificate_key: Path | None = None

    def __post_init__(self) -> None:
        if self.certificate_key is not None and self.certificate is None:
            raise SettingsError(f"certificate_key = {self.certificate_key}: needs certificate too")
        if self.certificate is not None:
            _check_certificate(self.certificate, self.certificate_key)
        for origin in self.cors:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise SettingsError(f"cors = {origin}: an origin has no path, such as https://example.org; or give *")


def _check_certificate(certificate: Path, key: Path | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # else it would ask
    except (OSError, ValueError) as error:
        files = f"certificate = {certificate}" + (f", certificate_key = {key}" if key else "")
        problem = f"no certificate in PEM with its unencrypted private key ({error})"
        raise SettingsError(f"{files}: {problem}; give both files") from None


def serve(service: Service, options: ServerOptions, log: Log, inspection: InspectionPage | None = None) -> None:
    """Run the HTTP server until SIGTERM or SIGINT, then let running requests end."""
    with asyncio.Runner(loop_factory=_loop_factory) as runner:
        runner.run(_serve(service, options, log, inspection))


async def _serve(service: Service, options: ServerOptions, log: Log, inspection: InspectionPage | None) -> None:
    host, port = find_address(options.host, options.port)
    loop, hangup = asyncio.get_running_loop(), asyncio.Event()
    # Handle signals before the runs are loaded: an unhandled SIGHUP ends the process.
    with handle_signals(lambda _: loop.call_soon_threadsafe(hangup.set), always=("SIGHUP",)):
        try:
            await service.start()
            _settle_garbage()
            log_responses = partial(log_request, with_texts=options.log_text) if options.log else None
            app = make_app(service, keys=options.keys, cors=options.cors, log=log_responses, inspection=inspection)
            host, port = find_address(host, port)  # check again: loading takes seconds
            server = make_server(app, (host, port), service.limits.body_seconds, options)
            await _run(server, service, options, (host, port), hangup, log, inspection)
        finally:
            if inspection is not None:
                inspection.close()
            await service.close()


def find_address(host: str, port: int) -> tuple[str, int]:
    """Find the IP address and port to listen on. Port 0 becomes a free port. Raises `SettingsError` if it is taken.

    The HTTP server shares ports with other processes, so it would not notice another service on this port.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            if sys.platform != "win32":  # on Windows the option would allow taking another process's port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            address = probe.getsockname()
            return address[0], address[1]
    except (OSError, OverflowError) as error:
        raise SettingsError(f"{host}:{port}: {error}; give another host or port") from None


def make_server(app: ASGIApp, address: tuple[str, int], seconds: float, options: ServerOptions) -> Server:
    """Create the HTTP server, without starting it. `seconds`: time limit for a request's headers to arrive."""
    return Server(
        app,
        address=address[0],
        port=address[1],
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=_BACKLOG,
        backpressure=_MOST_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=int(1000 * seconds), max_buffer_size=_HEAD_BYTES),
        log_enabled=False,
        ssl_cert=options.certificate,
        ssl_key=options.certificate_key or options.certificate,
        ssl_protocol_min=SSLProtocols.tls12,
    )


async def start(server: Server, address: tuple[str, int], seconds: float) -> asyncio.Task[None]:
    """Start the server, and wait until it listens. `seconds`: time limit for a client to read sent data."""
    serving = asyncio.create_task(server.serve())
    local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    while True:
        try:
            _, writer = await asyncio.open_connection(local_host, address[1])
            break
        except OSError:
            if serving.done():
                await serving
                raise TransduceError("the HTTP server has not started") from None
            await asyncio.sleep(0.01)
    writer.close()
    _set_write_timeout(address, seconds)
    return serving


def _set_write_timeout(address: tuple[str, int], seconds: float) -> None:
    """Close connections whose client does not read sent data for this many seconds (Linux).

    The HTTP server has no such limit. Connections inherit TCP_USER_TIMEOUT from their listening socket.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        if "socket:" not in os.path.realpath(f"/proc/self/fd/{name}"):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and listener.getsockname()[:2] == address:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


async def _run(
    server: Server,
    service: Service,
    options: ServerOptions,
    address: tuple[str, int],
    hangup: asyncio.Event,
    log: Log,
    inspection: InspectionPage | None,
) -> None:
    """Serve until a signal, then wait for running requests. A second signal ends the server at once."""
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[str]()
    reloading = asyncio.create_task(_reload_when_asked(service, hangup, options.watch, log, inspection))
    with handle_signals(
        lambda number: loop.call_soon_threadsafe(signals.put_nowait, number.name),
        "SIGBREAK",
        always=("SIGTERM", "SIGINT"),
    ):
        serving = await start(server, address, service.limits.body_seconds)
        if service.runs:
            _greet(service, options, address[1], log)
        if inspection is not None:
            inspection.greet(f"{_url(options, address[1])}/inspect/", log)
        asked = asyncio.create_task(signals.get())
        await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
            raise TransduceError("the HTTP server has ended")
        log.say(f"{asked.result()}: no new requests; {service.n_requests} are running")
        draining, again = asyncio.create_task(service.drain()), asyncio.create_task(signals.get())
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        is_complete = service.n_requests == 0
        server.stop()
        await asyncio.wait([serving, again], timeout=_LAST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in (reloading, draining, again):
        task.cancel()
    if not serving.done():  # cancelled at exit; granian reports that as an error
        loop.set_exception_handler(lambda _loop, _context: None)
    log.say("stopped" if is_complete else "stopped; some requests had not ended")


async def _reload_when_asked(
    service: Service, hangup: asyncio.Event, seconds: float, log: Log, inspection: InspectionPage | None = None
) -> None:
    """Reload changed runs at each SIGHUP (`hangup`), and every `seconds` if not 0. Each error is logged once."""
    logged = ""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds or None):
                await hangup.wait()
        is_asked = hangup.is_set()
        hangup.clear()
        names, errors = await service.reload()
        problem = "; ".join(str(error) or type(error).__name__ for error in errors)
        if problem and (is_asked or problem != logged):
            log.warn(f"the old model stays in service: {problem}")
        logged = problem
        if inspection is not None and (names or (is_asked and not errors)):
            inspection.forget_models()
        if names:
            _settle_garbage()
            log.say(f"new model in service: {', '.join(names)}")


def _settle_garbage() -> None:
    """Exclude long-lived objects from garbage collection, which would take longer than a translation."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _url(options: ServerOptions, port: int) -> str:
    scheme = "https" if options.certificate else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{port}"


def _greet(service: Service, options: ServerOptions, port: int, log: Log) -> None:
    address = _url(options, port)
    for run in service.runs:
        model = run.model
        choice = (model.generator if isinstance(model, AsyncTextGenerator) else model.translator).choice
        pairs = [f"{source} -> {target}" for source, target in run.directions]
        purpose = listed(pairs, _PAIRS) or "language model"
        log.say(f"{purpose}: {run.path} ({choice.precision})")
        for direction in run.directions if run.has_language_tokens and len(pairs) <= _PAIRS else ():
            for note in run.translator.between(*direction).translator.direction_notes():
                log.warn(note)
        if run.directions == (("src", "tgt"),):
            log.warn(f"{run.path} does not know its languages; clients ask by language: serve en-de={run.path}")
        for note in choice.notes():
            log.say(note)
    log.say(f"listening on {address}")
    for route in service.routes[:1]:
        pair = f'"source": "{route.source}", "target": "{route.target}"'
        log.say(f'curl {address}/v1/translate -d \'{{"text": "Hello.", {pair}}}\'')
    for name in list(service.generators())[:1]:
        log.say(f'curl {address}/v1/completions -d \'{{"model": "{name}", "prompt": "Once"}}\'')
