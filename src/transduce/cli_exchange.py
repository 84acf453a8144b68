"""The commands that carry models in and out; `cli.py` enters them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from transduce.output import print_lines


def import_model(
    kind: Annotated[str, Argument(metavar="KIND", help="marian, bert or gpt2.", show_default=False)],
    path: Annotated[Path, Argument(metavar="PATH", help="Folder as transformers keeps it.", show_default=False)],
    run: Annotated[Path, Argument(metavar="RUN", help="Run folder to make.", show_default=False)],
) -> None:
    """Make a run folder of another program's model; every command takes it.

    PATH holds config.json, model.safetensors (or pytorch_model.bin), and the vocabulary: source.spm, target.spm and
    vocab.json of marian, tokenizer.json (or the older files) of bert and gpt2.

    \b
    transduce import gpt2 gpt2 runs/gpt2
    transduce import marian opus-mt-en-de runs/opus
    transduce translate runs/opus < in.en > out.de
    """
    from transduce.exchange import import_run

    print_lines(import_run(kind, path, run))


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
    these cannot express is refused by the name of the setting. ONNX takes every run, CTranslate2 translators.

    \b
    transduce export runs/x --to huggingface x-marian
    transduce export runs/shakespeare --to onnx shakespeare-onnx
    transduce export runs/x --to ctranslate2 x-ct2 --quantization int8
    """
    from transduce.exchange import export_run

    print_lines(export_run(run, to, out, quantization=quantization))
