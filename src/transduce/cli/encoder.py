"""The commands of encoders alone. As in `cli.py`, heavy imports stand inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from transduce.cli.options import Device, Json, Run
from transduce.cli.output import print_lines


def fill(
    run: Run,
    texts: Annotated[
        list[str] | None,
        Argument(metavar="TEXT...", help="With <mask> where a word is to be told; default: stdin.", show_default=False),
    ] = None,
    top: Annotated[int, Option(help="Candidates a gap.", min=1)] = 5,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Fill gaps in text: what a run of task "masked" does. PROBABILITY, WORD, TEXT.

    \b
    transduce fill runs/bert "The capital of France is <mask>."
    transduce fill runs/bert --top 10 --json < texts.txt
    """
    from transduce.cli import use_encoder

    print_lines(use_encoder.fill(run, texts, top=top, device=device, as_json=json))


def classify(
    run: Run,
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="Text, or text<TAB>text; default: stdin.", show_default=False)
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Tell the label of each line of text: what a run of task "classification" does. LABEL<TAB>PROBABILITY.

    \b
    transduce classify runs/sst2 reviews.txt > labels.tsv
    echo "a fine film" | transduce classify runs/sst2 --json
    """
    from transduce.cli import use_encoder

    print_lines(use_encoder.classify(run, file or use_encoder.STDIN, device=device, as_json=json))
