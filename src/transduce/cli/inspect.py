"""`transduce inspect`: what a model computes for a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from transduce.cli import options as opt
from transduce.cli.output import print_lines, to_json
from transduce.config.decoding import DecodingOptions
from transduce.errors import SettingsError

if TYPE_CHECKING:
    from transduce.inspection.look import Inspection

_IN_SEARCH = ("beam", "length_penalty")


@opt.expand_decoding(without=DecodingOptions.model_fields.keys() - _IN_SEARCH)
def inspect(
    run: opt.Run,
    text: Annotated[str | None, opt.argument("TEXT", "Sentence to inspect; without it, start a local page.")] = None,
    target: Annotated[str | None, opt.option(help="Target of the sentence (default: the model's translation).")] = None,
    compare: Annotated[
        Path | None, opt.option(metavar="RUN", help="Another run, shown side by side with the first one.")
    ] = None,
    off: Annotated[
        list[str] | None, opt.option(metavar="NAME", help="Switch off a part, such as decoder.mask; repeatable.")
    ] = None,
    html: Annotated[
        Path | None, opt.option(metavar="FILE", help="Write the page with the recorded values inside; works offline.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print all values as JSON; with --compare, one line a run.")] = False,
    svg: Annotated[
        Path | None,
        opt.option(
            "--svg",
            "--png",
            metavar="FILE",
            help="Draw the attention of the last layer, averaged over heads (.svg or .png).",
        ),
    ] = None,
    port: Annotated[int, Option(help="Port of the live page; 0 takes a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the live page in a browser.")] = True,
    ablate_heads: Annotated[
        Path | None,
        opt.option(
            metavar="FILE",
            help="Switch off each head in turn; write loss and BLEU on --src and --ref. An interrupted run continues.",
        ),
    ] = None,
    src: Annotated[Path | None, opt.option(metavar="FILE", help="Sources for --ablate-heads.")] = None,
    ref: Annotated[Path | None, opt.option(metavar="FILE", help="References for --ablate-heads.")] = None,
    device: opt.Device = "auto",
    *,
    decoding: DecodingOptions,
) -> None:
    """Look inside a model.

    Without TEXT, start a local page to inspect sentences; with TEXT, print the attention weights.

    \b
    transduce inspect runs/x
    transduce inspect runs/x "A dog runs."
    transduce inspect runs/x "A dog runs." --html dog.html
    transduce inspect runs/x --compare runs/y
    transduce inspect runs/x --ablate-heads heads --src test.en --ref test.de
    """
    runs = [run] if compare is None else [run, compare]
    for_text = {"--target": target, "--off": off, "--html": html, "--json": json, "--svg": svg}
    for_page = {"--port": port, "--no-browser": not browser}
    for_ablation = {"--src": src, "--ref": ref}
    for_search = {opt.flag_of(name): True for name in decoding.model_fields_set}
    if ablate_heads is not None:
        _refuse({"TEXT": text, "--compare": compare, **for_text, **for_page, **for_search}, "with --ablate-heads")
        if src is None or ref is None:
            raise SettingsError(
                "--ablate-heads needs --src and --ref: files with sources and their reference translations"
            )
        _ablate_heads(run, src, ref, ablate_heads, device)
    elif text is None:
        _refuse(for_text, "without TEXT")
        _refuse(for_ablation, "without --ablate-heads")
        _serve(runs, port, browser, device, decoding)
    else:
        _refuse({**for_page, **for_ablation}, "with TEXT")
        _show(runs, text, target, tuple(off or ()), html, json, svg, device, decoding)


def _refuse(options: Mapping[str, object], when: str) -> None:
    if given := [name for name, value in options.items() if value not in (None, False, [])]:
        raise SettingsError(f"{', '.join(given)}: does not apply {when}; leave it out")


def _show(
    runs: Sequence[Path],
    text: str,
    target: str | None,
    off: Sequence[str],
    html: Path | None,
    json: bool,
    svg: Path | None,
    device: str,
    decoding: DecodingOptions,
) -> None:
    from transduce.inspection.look import kept_page, look
    from transduce.inspection.pictures import averaged_attention, save_picture, show_attention
    from transduce.inspection.subjects import open_subject
    from transduce.runs.atomic import write_text

    found = [look(open_subject(run, device=device, decoding=decoding), text, target, off=off) for run in runs]
    if svg is not None:
        save_picture(svg, *averaged_attention(found[0]))
    if html is not None:
        write_text(html, kept_page(found))
    if json:
        print_lines(to_json(one.to_json([part.name for part in one.parts])) for one in found)
        return
    for path, one in zip(runs, found, strict=True):
        title = [f"{path}:"] if len(runs) > 1 else []
        print_lines([*title, *_texts(one), "", show_attention(one), ""], colours=True)
    print_lines(f"written: {path}" for path in (html, svg) if path is not None)


def _texts(found: Inspection) -> Iterable[str]:
    from transduce.inspection.pictures import printable

    sides = found.sentence.sides
    return dict.fromkeys(printable(sides[side].text) for side in ("src", "tgt_out", "label") if side in sides)


def _serve(runs: Sequence[Path], port: int, browser: bool, device: str, decoding: DecodingOptions) -> None:
    from transduce.cli.serve import require_packages

    require_packages()
    from transduce.logging import Log
    from transduce.runs.folder import RunFolder
    from transduce.serving.inspection_page import InspectionPage, named_runs
    from transduce.serving.server import ServerOptions, serve
    from transduce.serving.service import Service

    for run in runs:
        RunFolder.open(run)  # an error now rather than on the page
    page = InspectionPage(named_runs(runs), device=device, decoding=decoding, together=len(runs) > 1, browse=browser)
    serve(Service([]), ServerOptions(port=port, log=False), Log(), page)


def _ablate_heads(run: Path, src: Path, ref: Path, output: Path, device: str) -> None:
    from transduce.data.lines import read_parallel
    from transduce.evaluation.head_ablation import ablate_heads, format_ablation
    from transduce.inspection.subjects import TranslationSubject, open_subject
    from transduce.logging import Log

    subject = open_subject(run, device=device)
    if not isinstance(subject, TranslationSubject):
        raise SettingsError(f"{run}: heads are compared by translations; give a run of task 'translation'")
    sources, references = read_parallel(src, ref, subject.tokenizers.src)
    rows = ablate_heads(subject, sources, references, output, Log())
    print_lines(format_ablation(rows))
