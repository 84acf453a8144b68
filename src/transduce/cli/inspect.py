"""`transduce inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from transduce.cli.options import Device, Run, argument, option
from transduce.cli.output import print_lines


def inspect(
    run: Run,
    sentence: Annotated[str, argument("SENTENCE", "Source sentence.")],
    tgt: Annotated[str | None, option(help="Translation to show (default: the model's translation).")] = None,
    html: Annotated[
        Path | None,
        option(metavar="FILE", help="Write a page with every layer and head; works offline."),
    ] = None,
    svg: Annotated[Path | None, option(metavar="FILE", help="Write the cross-attention as SVG or PNG.")] = None,
    device: Device = "auto",
) -> None:
    """Show the attention weights of a translation.

    \b
    transduce inspect runs/x "A dog runs."
    transduce inspect runs/x "A dog runs." --html dog.html
    """
    from transduce.decoding.translator import Translator
    from transduce.evaluation.finalize import attention_of
    from transduce.inspection.heatmap import attention_page, save_picture
    from transduce.inspection.terminal import show_attention
    from transduce.runs.atomic import write_text

    seen = attention_of(Translator.load(run, device=device), sentence, tgt=tgt)
    if html is not None:
        write_text(html, attention_page(seen.src, seen.tgt, seen.maps))
    if svg is not None:
        save_picture(svg, seen.maps[0])
    files = [f"written: {path}" for path in (html, svg) if path is not None]
    print_lines([f"{seen.src}\n{seen.tgt}\n", show_attention(seen.maps[0]), *files], colours=True)
