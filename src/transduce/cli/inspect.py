"""`transduce inspect`: show a model's computation for a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from transduce.cli import options as opt
from transduce.cli.output import print_lines, to_json
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.runs.atomic import write_text

if TYPE_CHECKING:
    from transduce.config.decoding import DecodingOptions
    from transduce.inspection.inspection import Inspection


@dataclass(frozen=True, kw_only=True)
class Inspect(opt.Command):
    """Look inside a model.

    Without TEXT, start a local page to inspect sentences; with TEXT, print the attention weights.

    \b
    transduce inspect runs/x
    transduce inspect runs/x "A dog runs."
    transduce inspect runs/x "A dog runs." --html dog.html
    transduce inspect runs/x --compare runs/y
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
    json: Annotated[bool, Option("--json", help="Print all values as JSON; with --compare, one line a run.")] = False
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
        if self.text is None:
            _refuse(for_text, "without TEXT")
            self._serve(runs, self.decoding())
        else:
            _refuse({"--port": self.port, "--no-browser": not self.browser}, "with TEXT")
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
