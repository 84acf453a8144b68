"""`transduce serve`, an HTTP service for translation and text generation, and `transduce inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from transduce.cli import options as opt
from transduce.cli.options import print_lines, to_json
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.process import raise_file_limit
from transduce.runs.atomic import write_text

if TYPE_CHECKING:
    from transduce.config.decoding import DecodingOptions
    from transduce.inspection.inspection import Inspection


@dataclass(frozen=True, kw_only=True)
class Inspect(opt.Command):
    """Look inside a model.

    Without TEXT, start a local page to inspect sentences. With TEXT, print the attention weights.

    \b
    transduce inspect runs/x
    transduce inspect runs/x "A dog runs."
    transduce inspect runs/x "A dog runs." --html dog.html
    transduce inspect runs/x --compare runs/y
    transduce inspect runs/x --export-site site
    """

    run: opt.Run
    text: Annotated[str | None, opt.argument("TEXT", "Sentence to inspect; without it, start a local page.")] = None
    target: Annotated[str | None, opt.option("Target of the sentence (default: the model's translation).")] = None
    compare: Annotated[
        Path | None, opt.option("Another run, shown side by side with the first one.", metavar="RUN")
    ] = None
    off: Annotated[
        list[str] | None, opt.option("Switch off a part, such as decoder.mask; repeatable.", metavar="NAME")
    ] = None
    html: Annotated[Path | None, opt.file("Write the page with the recorded values inside; works offline.")] = None
    export_site: Annotated[
        Path | None, opt.folder("Write a page that computes any sentence in the reader's browser, without a server.")
    ] = None
    json: Annotated[bool, Option("--json", help="Print all values as JSON; with --compare, one line per run.")] = False
    svg: Annotated[
        Path | None,
        opt.file("Draw the attention of the last layer, averaged over heads (.svg or .png).", "--svg", "--png"),
    ] = None
    port: Annotated[int, Option(help="Port of the live page; 0 takes a free one.", min=0, max=65535)] = 0
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the live page in a browser.")] = True
    src_lang: opt.SrcLang = None
    tgt_lang: opt.TgtLang = None
    device: opt.Device = "auto"
    beam: opt.Beam = None
    length_penalty: opt.LengthPenalty = None

    def execute(self) -> None:
        runs = [self.run] if self.compare is None else [self.run, self.compare]
        for_text = {f"--{name}": getattr(self, name) for name in ("target", "off", "html", "json", "svg")}
        for_server = {"--port": self.port, "--no-browser": not self.browser}
        if self.export_site is not None:
            others = {"TEXT": self.text, "--compare": self.compare, **for_text, **for_server}
            _refuse(others, "with --export-site")
            self._export_site(self.export_site, self.decoding())
        elif self.text is None:
            _refuse(for_text, "without TEXT")
            self._serve(runs, self.decoding())
        else:
            _refuse(for_server, "with TEXT")
            self._show(runs, self.text, self.decoding())

    def _show(self, runs: Sequence[Path], text: str, decoding: DecodingOptions) -> None:
        from transduce.inspection.inspected_models import open_subject
        from transduce.inspection.inspection import inspect_sentence, kept_page
        from transduce.inspection.pictures import averaged_attention, save_picture, show_attention

        models = [
            open_subject(run, device=self.device, decoding=decoding, languages=(self.src_lang, self.tgt_lang))
            for run in runs
        ]
        inspections = [inspect_sentence(model, text, self.target, off=self.off or ()) for model in models]
        if self.svg is not None:
            save_picture(self.svg, *averaged_attention(inspections[0]))
        if self.html is not None:
            write_text(self.html, kept_page(inspections))
        if self.json:
            print_lines(
                to_json(inspection.to_json([part.name for part in inspection.parts])) for inspection in inspections
            )
            return
        for path, inspection in zip(runs, inspections, strict=True):
            title = [f"{path}:"] if len(runs) > 1 else []
            print_lines([*title, *_texts(inspection), "", show_attention(inspection), ""], colours=True)
        print_lines(f"written: {path}" for path in (self.html, self.svg) if path is not None)

    def _export_site(self, folder: Path, decoding: DecodingOptions) -> None:
        from transduce.convert.folder import check_free
        from transduce.inspection.inspected_models import open_subject
        from transduce.inspection.site import sample_texts, site_page

        check_free(folder)
        languages = self.src_lang, self.tgt_lang
        subject = open_subject(self.run, device=self.device, decoding=decoding, languages=languages)
        assert subject.folder is not None
        page = folder / "index.html"
        content = site_page(subject, sample_texts(subject.folder))
        folder.mkdir(parents=True, exist_ok=True)
        write_text(page, content)
        print_lines([f"written: {page}"])

    def _serve(self, runs: Sequence[Path], decoding: DecodingOptions) -> None:
        opt.require_packages()
        from transduce.runs.folder import RunFolder
        from transduce.serving.inspection_page import InspectionPage, named_runs
        from transduce.serving.server import ServerOptions, serve
        from transduce.serving.service import Service

        for run in runs:
            RunFolder.open(run)  # report errors here rather than on the page
        page = InspectionPage(
            named_runs(runs),
            device=self.device,
            decoding=decoding,
            languages=(self.src_lang, self.tgt_lang),
            together=len(runs) > 1,
            browse=self.browser,
        )
        serve(Service([]), ServerOptions(port=self.port, log=False), Log(), page)


def _refuse(options: Mapping[str, object], when: str) -> None:
    if given := [name for name, value in options.items() if value not in (None, False, [])]:
        raise SettingsError(f"{', '.join(given)}: does not apply {when}; leave it out")


def _texts(inspection: Inspection) -> Iterable[str]:
    from transduce.inspection.pictures import printable

    sides = inspection.sentence.sides
    return dict.fromkeys(printable(sides[side].text) for side in ("src", "tgt_out", "label") if side in sides)


@dataclass(frozen=True, kw_only=True)
class Serve(opt.Command):
    """Serve runs over HTTP.

    SIGTERM or Ctrl-C ends the service. SIGHUP reloads replaced runs.

    \b
    transduce serve runs/en-de runs/de-en
    transduce serve runs/gpt runs/en-de
    transduce serve en-de=runs/x --port 8000 --watch 10
    transduce serve runs/x+runs/y
    transduce serve --new-api-key alice >> keys.txt
    transduce serve runs/x --host 0.0.0.0 --api-key-file keys.txt
    """

    runs: Annotated[
        list[str] | None,
        opt.argument("RUN", "Run folders. Write en-de=RUN to name a run's languages, and RUN+RUN for an ensemble."),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all addresses of the machine.")] = "127.0.0.1"
    port: Annotated[int, Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080
    api_key_file: Annotated[Path | None, opt.file("Accept only clients with a key in this file.")] = None
    new_api_key: Annotated[
        str | None, opt.option("Print a new key, and the line for the key file; then exit.", metavar="NAME")
    ] = None
    pivot: Annotated[bool, Option("--pivot", help="Also translate with two runs, through a third language.")] = False
    watch: Annotated[
        float, Option(help="Seconds between checks for replaced runs (0: reload on SIGHUP only).", min=0.0)
    ] = 0.0
    max_requests: Annotated[
        int | None, Option(help="Maximum open requests; more get status 429 (default: 32 per core).", min=1)
    ] = None
    max_tokens: Annotated[
        int, Option(help="Maximum tokens (input and output, times beams) of open requests; more get 429.", min=1)
    ] = 200_000
    deadline: Annotated[float, Option(help="Seconds after which a request is cancelled.", min=0.01)] = 10.0
    cors: Annotated[
        list[str] | None, opt.option("Let pages of this origin use the service; repeatable.", metavar="ORIGIN")
    ] = None
    certificate: Annotated[Path | None, opt.file("TLS certificate (PEM).")] = None
    certificate_key: Annotated[Path | None, opt.file("Private key of the certificate (PEM).")] = None
    inspect: Annotated[bool, Option("--inspect", help="Also serve the page for inspecting the runs.")] = False
    log_text: Annotated[bool, Option("--log-text", help="Log the texts of requests too.")] = False
    glossary_file: Annotated[
        Path | None,
        opt.file("Keep the glossaries of clients in this file (default: in memory)."),
    ] = None
    device: opt.Device = "auto"
    precision: opt.Precision = "float32"
    quiet: opt.Quiet = False

    def execute(self) -> None:
        opt.require_packages()
        from transduce.serving.access import ApiKeys, Limits
        from transduce.serving.glossaries import Glossaries
        from transduce.serving.server import ServerOptions
        from transduce.serving.server import serve as run_server
        from transduce.serving.service import RunSpec, Service

        if self.new_api_key is not None:
            _print_key(self.new_api_key)
            return
        if not self.runs:
            raise SettingsError("no run folder is given; transduce serve RUN")
        if self.inspect and self.api_key_file is not None:
            raise SettingsError("--inspect: its page has no API key; leave out --api-key-file, or --inspect")
        options = ServerOptions(
            host=self.host,
            port=self.port,
            keys=ApiKeys(self.api_key_file),
            cors=tuple(self.cors or ()),
            log=not self.quiet,
            log_text=self.log_text,
            watch=self.watch,
            certificate=self.certificate,
            certificate_key=self.certificate_key,
        )
        limits = Limits(max_tokens=self.max_tokens, seconds=self.deadline)
        specs = [RunSpec.parse(run) for run in self.runs]
        service = Service(
            specs,
            limits=limits if self.max_requests is None else replace(limits, max_requests=self.max_requests),
            device=self.device,
            precision=cast(Any, self.precision),
            pivot=self.pivot,
            glossaries=Glossaries(self.glossary_file),
        )
        inspection = None
        if self.inspect:
            from transduce.serving.inspection_page import InspectionPage, named_runs  # imports torch

            inspection = InspectionPage(
                named_runs(list(dict.fromkeys(spec.path for spec in specs))), device=self.device
            )
        raise_file_limit()
        run_server(service, options, Log(quiet=self.quiet), inspection)


def _print_key(name: str) -> None:
    from transduce.serving.access import new_key

    secret, line = new_key(name)
    Log().say(f"key: {secret}\nGive it to the client; it is stored nowhere. Append this line to the key file:")
    print(line)
