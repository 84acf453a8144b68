"""The commands that carry models in and out; `cli.py` enters them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from transduce.cli.options import Quiet
from transduce.cli.output import print_lines


def import_model(
    kind: Annotated[str, Argument(metavar="KIND", help="marian, bert or gpt2.", show_default=False)],
    path: Annotated[
        str,
        Argument(metavar="PATH", help="Folder of transformers, or OWNER/NAME to download.", show_default=False),
    ],
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder to make.", show_default=False)],
    revision: Annotated[
        str | None, Option(help="Branch, tag or commit of OWNER/NAME; default: main.", show_default=False)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make a run folder of another program's model; every command takes it.

    PATH holds config.json, model.safetensors (or pytorch_model.bin), and the vocabulary: source.spm, target.spm and
    vocab.json of marian, tokenizer.json (or the older files) of bert and gpt2. Where no folder is called OWNER/NAME,
    the model of that name on the Hub is downloaded.

    \b
    transduce import gpt2 openai-community/gpt2 runs/gpt2
    transduce import marian opus-mt-en-de runs/opus
    transduce import marian Helsinki-NLP/opus-mt-en-de runs/opus
    transduce translate runs/opus < in.en > out.de
    """
    from transduce.convert.exchange import import_run
    from transduce.logging import Log

    print_lines(import_run(kind, path, run, revision=revision, log=Log(quiet=quiet)))


def export_model(
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder: the model.", show_default=False)],
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to make.", show_default=False)],
    to: Annotated[str, Option(help="huggingface, onnx or ctranslate2.", show_default=False)],
    quantization: Annotated[
        str | None, Option(help="Of ctranslate2 (int8, int16, float16, ...) and onnx (int8).", show_default=False)
    ] = None,
) -> None:
    """Make a folder that transformers, onnxruntime or CTranslate2 loads, and check it against the run.

    In transformers a translator is a MarianMTModel, a language model a GPT2LMHeadModel, an encoder a Bert model; what
    these cannot express is refused by the name of the setting: train with model.residual=post (a translator) or
    model.positions=learned (a language model) for it. ONNX takes every run, CTranslate2 translators.

    \b
    transduce export runs/x --to huggingface x-marian
    transduce export runs/shakespeare --to onnx shakespeare-onnx
    transduce export runs/x --to ctranslate2 x-ct2 --quantization int8
    """
    from transduce.convert.exchange import export_run

    print_lines(export_run(run, to, out, quantization=quantization))
