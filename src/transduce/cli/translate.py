"""`transduce translate` and `score`: what a translator does with text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from transduce.cli import options as opt
from transduce.cli.output import check_output, print_lines, to_json, write_lines
from transduce.config.decoding import DecodingOptions

if TYPE_CHECKING:
    from transduce.decoding.loading import DecoderT
    from transduce.decoding.results import Style
    from transduce.decoding.translator import Translator

STDIN = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslateRequest:
    """The options of `transduce translate`."""

    run: opt.Run
    files: Annotated[list[Path] | None, opt.argument("FILE", "Text files (default: stdin).")] = None
    output: Annotated[
        Path | None, opt.option("--output", "-o", metavar="FILE", help="Write to FILE (default: stdout).")
    ] = None
    scores: Annotated[bool, Option("--scores", help="Print SCORE<TAB>TEXT.")] = False
    json: opt.Json = False
    prefix: Annotated[
        Path | None, opt.option(metavar="FILE", help="What each translation starts with, line by line.")
    ] = None
    device: opt.Device = "auto"
    precision: opt.Precision = "float32"
    output_dir: Annotated[
        Path | None, opt.option(metavar="DIR", help="Write the translation of each file to DIR/NAME; resumable.")
    ] = None
    ray: Annotated[
        str | None,
        opt.option(metavar="ADDRESS", help="Translate on the nodes of this Ray cluster: HOST:PORT, or auto."),
    ] = None


@opt.expand_decoding(without=("scores",), flags={"n_best": "--nbest"})
@opt.expand(TranslateRequest)
def translate(request: TranslateRequest, *, decoding: DecodingOptions) -> None:
    """Translate text line by line. Empty lines stay empty.

    --nbest prints NUMBER<TAB>SCORE<TAB>TEXT for each translation of a line.

    If an error interrupts --output FILE, the lines so far are kept in FILE.partial.

    --output-dir is for many or large files: it shows progress, compresses like
    the input, and after a kill or an error the same command resumes, without a
    lost or doubled line.

    \b
    transduce translate runs/x < in.en > out.de
    transduce translate runs/x in.en.gz -o out.de --beam 1
    transduce translate runs/x in.en --nbest 5 --json
    transduce translate runs/x in.en --prefix starts.de
    transduce shortlist runs/x; transduce translate runs/x --shortlist < in.en
    transduce translate runs/x shards/*.en.gz --output-dir out
    transduce translate runs/x shards/*.en.gz --output-dir out --ray auto
    """
    from transduce.decoding.translator import Translator
    from transduce.errors import SettingsError

    style: Style = (
        "json" if request.json else "nbest" if decoding.n_best > 1 else "scores" if request.scores else "text"
    )
    if request.output_dir is not None:
        _translate_to_folder(request, request.output_dir, decoding, style)
        return
    if request.ray is not None:
        raise SettingsError("--ray is for --output-dir DIR")
    check_output(request.output, *(request.files or ()), request.prefix)
    translator = load_with_notes(Translator.load, request.run, request.device, request.precision)
    decoding = decoding.model_copy(update={"scores": style != "text"})
    lines = translate_files(translator, request.files or [STDIN], decoding, style, request.prefix)
    if request.output:
        write_lines(request.output, lines)
    else:
        print_lines(lines)


def _translate_to_folder(request: TranslateRequest, folder: Path, decoding: DecodingOptions, style: Style) -> None:
    from transduce.bulk.ray_cluster import RayCluster
    from transduce.bulk.translate import translate_to_folder
    from transduce.errors import SettingsError

    if request.output is not None:
        raise SettingsError("--output and --output-dir: give only one of them")
    if request.prefix is not None:
        raise SettingsError("--prefix is for one output; leave out --output-dir")
    translate_to_folder(
        request.run,
        request.files or [],
        folder,
        decoding,
        style=style,
        cluster=None if request.ray is None else RayCluster(request.ray),
        device=request.device,
        precision=cast(Any, request.precision),  # `Translator.load` checks it
    )


def score(
    run: opt.Run,
    src: Annotated[Path, opt.option(metavar="FILE", help="Source text.")],
    tgt: Annotated[Path, opt.option(metavar="FILE", help="Translations, aligned line by line.")],
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Print the log-probability (nats) of each given translation.

    \b
    transduce score runs/x --src in.en --tgt in.de
    transduce score runs/x --src in.en --tgt in.de --json
    """
    from transduce.data.lines import read_parallel
    from transduce.decoding.translator import Translator

    translator = Translator.load(run, device=device)
    sources, targets = read_parallel(src, tgt, translator.tokenizers.src)
    found = translator.score(sources, targets)
    if json:
        keys = ("log_prob", "n_tokens", "token_log_probs")
        print_lines(to_json({key: getattr(one, key) for key in keys}) for one in found)
    else:
        print_lines(f"{one.log_prob:.4f}" for one in found)


def load_with_notes(load: Callable[..., DecoderT], run: Path, device: str, precision: str) -> DecoderT:
    """The translator or generator that `load` gives; a line to stderr if it is slower than it could be."""
    from transduce.logging import Log

    found = load(run, device=device, precision=cast(Any, precision))  # `load` checks it
    for note in found.choice.notes():
        Log().say(note)
    return found


def translate_files(
    translator: Translator,
    files: Sequence[Path],
    options: DecodingOptions,
    style: Style,
    prefix: Path | None = None,
) -> Iterator[str]:
    """Translate the lines of files (`-`: stdin) and yield lines to print; one by one if stdin is a terminal.

    `prefix`: a file with what each translation starts with.

    Notes about translations go to stderr: the first few, and their number at the end. JSON contains them.
    """
    from transduce.data.lines import read_inputs, read_lines
    from transduce.decoding.results import MAX_NOTES, Notes, format_rows, note_on
    from transduce.errors import DataError
    from transduce.logging import Log

    lines = chain.from_iterable(read_inputs(file, translator.tokenizers.src) for file in files)
    interactive = list(files) == [STDIN] and sys.stdin.isatty()
    parts: Iterable[Iterable[str]] = ([line] for line in lines) if interactive else [lines]
    prefixes = None if prefix is None else iter(read_lines(prefix))
    notes, number = Notes(Log(), most=sys.maxsize if interactive else MAX_NOTES), 0
    for part in parts:
        sources, inputs = tee(part)
        translations = translator.translate_lines(inputs, options, prefixes=prefixes)
        for src, translation in zip(sources, translations, strict=True):
            number += 1
            if note := note_on(style, number, src, translation):
                notes.show(note)
            yield from format_rows(style, number, src, translation, n_best=options.n_best)
    notes.close(number)
    if prefixes is not None and next(prefixes, None) is not None:
        raise DataError(f"{prefix}: more lines than the text, which has {number}")
