"""The command that judges a run. As in `cli.py`, heavy imports stand inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from transduce.options import BatchTokens, Beam, Device, Json, Longest, Lowercase, Penalty, Run, Tokenize
from transduce.output import print_lines


def evaluate(
    run: Run,
    src: Annotated[Path | None, Option(metavar="FILE", help="Source text.", show_default=False)] = None,
    ref: Annotated[
        Path | None, Option(metavar="FILE", help="Reference translations, line for line.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, Option(metavar="FILE", help="Text that a language model is to tell.", show_default=False)
    ] = None,
    labels: Annotated[
        Path | None,
        Option(metavar="FILE", help="label<TAB>text lines that a classifier is to tell.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        Option(help="Tokens that are new in each row of --text; default: all of it.", min=1, show_default=False),
    ] = None,
    hyp: Annotated[
        Path | None, Option(metavar="FILE", help="Judge these translations instead of RUN's.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None,
        Option(metavar="RUN|FILE", help="Another run or its output: paired bootstrap.", show_default=False),
    ] = None,
    tokenize: Tokenize = None,
    lowercase: Lowercase = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Keep the translations too.", show_default=False)
    ] = None,
    beam: Beam = None,
    max_length: Longest = None,
    length_penalty: Penalty = None,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """BLEU, chrF and TER of a run's translations, with their signatures; or how well it tells text.

    \b
    transduce evaluate runs/x --src test.en --ref test.de
    transduce evaluate runs/x --src test.en --ref test.de --against runs/y
    transduce evaluate runs/x --src test.tok.en --ref test.tok.de --tokenize none --json
    transduce evaluate runs/book --text other.txt
    transduce evaluate runs/sst2 --labels dev.tsv
    """
    from transduce import use
    from transduce.errors import SettingsError

    if labels is not None and src is ref is text is None:
        from transduce import use_encoder

        print_lines(use_encoder.evaluate_labels(run, labels, device=device, as_json=json))
        return
    if text is not None and src is ref is labels is None:
        print_lines(use.evaluate_text(run, text, stride=stride, batch_tokens=batch_tokens, device=device, as_json=json))
        return
    if src is None or ref is None or text is not None or labels is not None:
        raise SettingsError(
            "evaluate needs --src and --ref of a translator, --text of a language model, or --labels of a classifier"
        )

    search = use.Search(beam=beam, max_length=max_length, length_penalty=length_penalty, batch_tokens=batch_tokens)
    lines = use.evaluate(
        run,
        (src, ref),
        hypotheses=hyp,
        against=against,
        metric=(tokenize, lowercase),
        search=search,
        output=output,
        device=device,
        as_json=json,
    )
    print_lines(lines)
