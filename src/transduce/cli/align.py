"""`transduce align`: word alignments of sentence pairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from transduce.cli import options as opt
from transduce.cli.output import print_lines
from transduce.cli.translate import load_with_notes

if TYPE_CHECKING:
    from transduce.data.word_links import WordLink


def align(
    run: opt.Run,
    src: Annotated[Path, opt.option(metavar="FILE", help="Source text.")],
    tgt: Annotated[Path, opt.option(metavar="FILE", help="Translations, aligned line by line.")],
    gold: Annotated[
        Path | None,
        opt.option(metavar="FILE", help="Links to compare with: i-j, or i?j for a possible link."),
    ] = None,
    reverse: Annotated[
        Path | None, opt.option(metavar="RUN", help="Run folder of a model for the other direction, to combine with.")
    ] = None,
    symmetrize: Annotated[
        str | None,
        opt.option(help="How to combine both: grow-diag-final-and (the default), intersection or union."),
    ] = None,
    method: Annotated[
        str | None,
        opt.option(
            help="guided (a head trained to align), attention (average of a layer) or leave-out (loss of probability "
            "without a source word); default: guided if RUN, and with --reverse both runs, have it, else leave-out."
        ),
    ] = None,
    layer: Annotated[
        int | None, opt.option(help="Decoder layer for attention, from 1 (default: the last but one).", min=1)
    ] = None,
    device: opt.Device = "auto",
    precision: opt.Precision = "float32",
) -> None:
    """Align the words of sentence pairs; print i-j for each link.

    Words are separated by white space and counted from 0. With --gold,
    the alignment error rate, precision and recall go to stderr.

    \b
    transduce align runs/x --src test.en --tgt test.de > test.align
    transduce align runs/x --src a.en --tgt a.de --reverse runs/y
    transduce align runs/x --src a.en --tgt a.de --gold a.align
    transduce align runs/x --src a.en --tgt a.de --method attention
    """
    from transduce.data.lines import read_parallel
    from transduce.data.word_links import format_links, read_links
    from transduce.decoding import word_alignment as words
    from transduce.decoding.translator import Translator
    from transduce.errors import SettingsError
    from transduce.evaluation.alignment_error import score_links
    from transduce.logging import Log
    from transduce.runs.folder import RunFolder

    if symmetrize is not None and reverse is None:
        raise SettingsError(f"--symmetrize {symmetrize}: needs --reverse RUN, a model for the other direction")
    how = symmetrize or words.GROW
    words.check_symmetrization(how)
    folders = [run] if reverse is None else [run, reverse]
    translators = [load_with_notes(Translator.load, folder, device, precision) for folder in folders]
    settings = [RunFolder.open(folder).settings for folder in folders]
    method = method or words.common_method(settings)
    heads = [words.heads_of(one, method, layer) for one in settings]
    sources, targets = read_parallel(src, tgt, translators[0].tokenizers.src)
    known = None if gold is None else read_links(gold, sources, targets)
    log = Log()
    found: list[list[WordLink]] = []

    def lines() -> Iterator[str]:
        both = [words.align_words(translators[0], sources, targets, heads[0])]
        if reverse is not None:
            both.append(words.align_words(translators[1], targets, sources, heads[1]))
        with log.progress("aligning") as bar:
            for number, links in enumerate(zip(*both, strict=True), 1):
                one = words.symmetrize(*links, how) if len(links) == 2 else links[0]
                if known is not None:
                    found.append(one)
                bar.update(number / len(sources))
                yield format_links(one)

    print_lines(lines())
    if known is not None:
        log.say(f"{method}: {score_links(found, known).line()}")
