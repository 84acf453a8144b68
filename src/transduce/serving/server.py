"""The HTTP server: uvicorn with our timeouts, signals and shutdown."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import uvicorn

from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.serving.app import make_app
from transduce.serving.async_generator import AsyncTextGenerator
from transduce.serving.http_protocol import http_protocol
from transduce.serving.keys import NO_KEYS, ApiKeys
from transduce.serving.service import Service

try:
    from uvloop import new_event_loop as _loop_factory

    _LISTENERS = 32  # it accepts one connection per socket and step; without copies, some wait for seconds under load
except ImportError:  # Windows
    _loop_factory, _LISTENERS = asyncio.new_event_loop, 1  # type: ignore[assignment]

_BACKLOG = 4096
_GARBAGE = 10_000  # objects after which garbage is collected: those of about a hundred requests
_IDLE_SECONDS = 20  # of a connection that is kept open
_LAST_SECONDS = 2  # for clients to read the last responses


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how to listen.

    Attributes:
        host: Address; the default is reached from this machine only.
        port: 0 takes a free one.
        keys: Who may use the service.
        cors: Origins whose pages may use it from a browser.
        log: Log requests.
        log_text: With their texts.
        watch: Seconds between looks at the run folders; 0: reload on SIGHUP only.
        certificate, certificate_key: PEM files, for TLS.
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
            raise SettingsError("--certificate-key: needs --certificate too")
        for name in ("certificate", "certificate_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingsError(f"--{name.replace('_', '-')} {path}: there is no such file")
        if self.certificate is not None:
            _check_certificate(self.certificate, self.certificate_key)
        for origin in self.cors:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise SettingsError(f"--cors {origin}: an origin has no path, such as https://example.org; or give *")


def _check_certificate(certificate: Path, key: Path | None) -> None:
    context, what = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"--certificate {certificate}: no certificate in PEM"
    try:
        context.load_verify_locations(certificate)
        own = f"--certificate {certificate}: no private key inside; give --certificate-key"
        what = own if key is None else f"--certificate-key {key}: not the unencrypted private key of {certificate}"
        context.load_cert_chain(certificate, key, password="")  # else OpenSSL would ask for one
    except (OSError, ValueError) as error:
        raise SettingsError(f"{what} ({error})") from None


def serve(make_service: Callable[[], Service], options: ServerOptions, log: Log) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end."""
    with asyncio.Runner(loop_factory=_loop_factory) as runner:
        runner.run(_serve(make_service, options, log))


async def _serve(make_service: Callable[[], Service], options: ServerOptions, log: Log) -> None:
    listener = _listen(options)
    service = make_service()
    try:
        await service.start()
        _settle_garbage()
        app, refusals = make_app(
            service, keys=options.keys, cors=options.cors, log=options.log, log_text=options.log_text
        )
        config = uvicorn.Config(
            app,
            http=http_protocol(refusals.response, service.limits.body_seconds),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_SECONDS,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.certificate_key,
        )
        server = _Server(config, service, log)
        with _reload_on_hangup(service, log):
            _greet(service, options, listener.getsockname()[1], log)
            watching = asyncio.create_task(_watch(service, options.watch, log)) if options.watch else None
            await server.serve(sockets=[listener, *(listener.dup() for _ in range(_LISTENERS - 1))])
            if watching is not None:
                watching.cancel()
        refusals.write_log()
        log.say("stopped" if server.drained else "stopped; some requests had not ended")
    finally:
        listener.close()
        await service.close()


class _Server(uvicorn.Server):
    """Ends when no request is running: until then it answers, so that /ready can say that it will end."""

    def __init__(self, config: uvicorn.Config, service: Service, log: Log) -> None:
        super().__init__(config)
        self._service, self._log = service, log
        self._draining: asyncio.Task[None] | None = None
        self.drained = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A first signal drains, a second one ends at once. uvicorn calls this."""
        if self._draining is not None:
            asyncio.get_running_loop().call_soon_threadsafe(self._abort)
            return
        self._log.say(f"{signal.Signals(sig).name}: no new requests; {self._service.admission.n_requests} are running")
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        self.drained = await self._service.drain()
        self.should_exit = True
        if self.drained:
            await asyncio.sleep(_LAST_SECONDS)
        self._abort()  # else uvicorn waits for clients without limit

    def _abort(self) -> None:
        self.force_exit = self.should_exit = True
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingsError(f"{options.host}:{options.port}: {error}; give another --host or --port") from None
    return listener


@contextmanager
def _reload_on_hangup(service: Service, log: Log) -> Iterator[None]:
    """Inside, SIGHUP reloads, where the platform has it."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[str]]()
    number = getattr(signal, "SIGHUP", None)
    if number is None:
        yield
        return

    def reload() -> None:
        tasks.add(task := loop.create_task(_reload(service, log)))
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(number, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
        for task in tasks:
            task.cancel()


async def _reload(service: Service, log: Log, known: str = "") -> str:
    """Reload; returns what is wrong with new folders. `known`: what was logged before."""
    try:
        names = await service.reload()
    except Exception as error:  # whatever is wrong
        problem = str(error) or type(error).__name__
        if problem != known:
            log.warn(f"the old model stays in service: {problem}")
        return problem
    if names:
        _settle_garbage()
        log.say(f"new model in service: {', '.join(names)}")
    return ""


def _settle_garbage() -> None:
    """Let Python's garbage collector leave alone what lives as long as the models, and look less often for the rest.

    To look through all modules takes longer than a translation, and nearly all other objects end with their request.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE)


async def _watch(service: Service, seconds: float, log: Log) -> None:
    problem = ""
    while True:
        await asyncio.sleep(seconds)
        problem = await _reload(service, log, problem)


def _greet(service: Service, options: ServerOptions, port: int, log: Log) -> None:
    scheme = "https" if options.certificate else "http"
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{scheme}://{host}:{port}"
    for run in service.runs:
        model = run.model
        choice = (model.generator if isinstance(model, AsyncTextGenerator) else model.translator).choice
        what = f"{run.source} -> {run.target}" if run.source else "language model"
        log.say(f"{what}: {run.path} ({choice.precision})")
        if (run.source, run.target) == ("src", "tgt"):
            log.warn(f"{run.path} does not know its languages; clients ask by language: serve en-de={run.path}")
        for note in choice.notes():
            log.say(note)
    log.say(f"listening on {address}")
    for route in islice(service.routes(), 1):
        pair = f'"source": "{route.source}", "target": "{route.target}"'
        log.say(f'curl {address}/v1/translate -d \'{{"text": "Hello.", {pair}}}\'')
    for name in islice(service.generators(), 1):
        log.say(f'curl {address}/v1/completions -d \'{{"model": "{name}", "prompt": "Once"}}\'')
