"""`transduce serve`: an HTTP service for translation and text generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, cast

from typer import Option

from transduce.cli import options as opt
from transduce.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """The options of `transduce serve`."""

    runs: Annotated[
        list[str] | None, opt.argument("RUN", "Run folders; en-de=RUN where a run does not know its languages.")
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all of the machine's.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080
    api_key_file: Annotated[
        Path | None, opt.option(metavar="FILE", help="Let in only clients with a key of this file.")
    ] = None
    new_api_key: Annotated[
        str | None, opt.option(metavar="NAME", help="Print a new key, and the line for the key file; then exit.")
    ] = None
    pivot: Annotated[bool, Option("--pivot", help="Join two runs through a third language.")] = False
    watch: Annotated[float, Option(help="Look every N seconds for replaced runs; 0: only on SIGHUP.", min=0.0)] = 0.0
    max_requests: Annotated[
        int | None, Option(help="Requests waiting or running; more get status 429 (default: 32 per core).", min=1)
    ] = None
    max_tokens: Annotated[
        int, Option(help="Tokens of inputs and outputs times beams, waiting or running; more get status 429.", min=1)
    ] = 200_000
    deadline: Annotated[float, Option(help="Seconds after which a request is given up.", min=0.01)] = 10.0
    cors: Annotated[
        list[str] | None, opt.option(metavar="ORIGIN", help="Let pages of this origin use the service; repeatable.")
    ] = None
    certificate: Annotated[Path | None, opt.option(metavar="FILE", help="TLS certificate (PEM).")] = None
    certificate_key: Annotated[Path | None, opt.option(metavar="FILE", help="Its private key (PEM).")] = None
    inspect: Annotated[bool, Option("--inspect", help="Also serve the page that shows the inside of the runs.")] = False
    log_text: Annotated[bool, Option("--log-text", help="Log the texts of requests too.")] = False
    glossary_file: Annotated[
        Path | None,
        opt.option(metavar="FILE", help="Keep the glossaries of clients in this file (default: in memory)."),
    ] = None
    device: opt.Device = "auto"
    precision: opt.Precision = "float32"
    quiet: opt.Quiet = False


@opt.expand(ServeRequest)
def serve(request: ServeRequest) -> None:
    """Serve runs over HTTP.

    SIGTERM or Ctrl-C ends the service; SIGHUP reloads replaced runs.

    \b
    transduce serve runs/en-de runs/de-en
    transduce serve runs/gpt runs/en-de
    transduce serve en-de=runs/x --port 8000 --watch 10
    transduce serve --new-api-key alice >> keys.txt
    transduce serve runs/x --host 0.0.0.0 --api-key-file keys.txt
    """
    require_packages()
    from transduce.logging import Log
    from transduce.process import raise_file_limit
    from transduce.serving.access_log import background_stderr
    from transduce.serving.glossaries import Glossaries
    from transduce.serving.inspection_page import InspectionPage, named_runs
    from transduce.serving.keys import ApiKeys
    from transduce.serving.limits import Limits
    from transduce.serving.routes import RunSpec
    from transduce.serving.server import ServerOptions
    from transduce.serving.server import serve as run_server
    from transduce.serving.service import Service

    if request.new_api_key is not None:
        _print_key(request.new_api_key)
        return
    if not request.runs:
        raise SettingsError("no run folder is given; transduce serve RUN")
    if request.inspect and request.api_key_file is not None:
        raise SettingsError("--inspect: its page has no API key; leave out --api-key-file, or --inspect")
    options = ServerOptions(
        host=request.host,
        port=request.port,
        keys=ApiKeys() if request.api_key_file is None else ApiKeys.load(request.api_key_file),
        cors=tuple(request.cors or ()),
        log=not request.quiet,
        log_text=request.log_text,
        watch=request.watch,
        certificate=request.certificate,
        certificate_key=request.certificate_key,
    )
    limits = Limits(max_tokens=request.max_tokens, seconds=request.deadline)
    specs = [RunSpec.parse(run) for run in request.runs]
    service = Service(
        specs,
        limits=limits if request.max_requests is None else replace(limits, max_requests=request.max_requests),
        device=request.device,
        precision=cast(Any, request.precision),
        pivot=request.pivot,
        glossaries=Glossaries(request.glossary_file),
    )
    runs = named_runs([spec.path for spec in specs])
    inspection = InspectionPage(runs, device=request.device) if request.inspect else None
    raise_file_limit()
    with background_stderr():
        run_server(service, options, Log(quiet=request.quiet), inspection)


def require_packages() -> None:
    for name in ("granian", "prometheus_client", "sentencex", "starlette"):
        if find_spec(name) is None:
            raise SettingsError(f"{name} is not installed; pip install 'transduce[serve]'")


def _print_key(name: str) -> None:
    from transduce.logging import Log
    from transduce.serving.keys import new_key

    secret, line = new_key(name)
    Log().say(f"key: {secret}\nGive it to the client; it is stored nowhere. Append this line to the key file:")
    print(line)
