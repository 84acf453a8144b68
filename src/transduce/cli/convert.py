"""The commands `transduce import` and `transduce export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from transduce.cli.options import Quiet, argument, option
from transduce.cli.output import print_lines


def import_model(
    kind: Annotated[str, argument("KIND", "marian, bert or gpt2.")],
    path: Annotated[str, argument("PATH", "Model folder, or OWNER/NAME of a model on the Hub.")],
    run: Annotated[Path, argument("RUN", "Run folder to create.")],
    revision: Annotated[str | None, option(help="Branch, tag or commit of OWNER/NAME (default: main).")] = None,
    quiet: Quiet = False,
) -> None:
    """Create a run folder from a Hugging Face transformers model.

    A model folder contains config.json, model.safetensors (or pytorch_model.bin) and the vocabulary: source.spm,
    target.spm and vocab.json for marian, tokenizer.json (or the older files) for bert and gpt2. Unless there is a
    folder OWNER, OWNER/NAME is downloaded from the Hugging Face Hub, with weights from model.safetensors only.

    \b
    transduce import gpt2 openai-community/gpt2 runs/gpt2
    transduce import marian opus-mt-en-de runs/opus
    transduce import marian Helsinki-NLP/opus-mt-en-de runs/opus
    transduce translate runs/opus < in.en > out.de
    """
    from transduce.convert.importing import import_run

    print_lines(import_run(kind, path, run, revision=revision, quiet=quiet))


def export_model(
    run: Annotated[Path, argument("RUN", "Run folder of the model.")],
    out: Annotated[Path, argument("OUT", "Folder to create.")],
    to: Annotated[str, option(help="Format: huggingface, onnx or ctranslate2.")],
    quantization: Annotated[
        str | None, option(help="For ctranslate2: int8, int16, float16, ...; for onnx: int8 (default: none).")
    ] = None,
) -> None:
    """Export a model to transformers, ONNX or CTranslate2.

    The outputs are compared with the run's. In transformers a translator becomes a MarianMTModel, a language model a
    GPT2LMHeadModel, an encoder a BERT model. A setting that the format cannot express is refused by name; for
    transformers, train a translator with model.residual=post and a language model with model.positions=learned. ONNX
    supports Transformers, GPT and BERT models, CTranslate2 Transformers that translate.

    \b
    transduce export runs/x --to huggingface x-marian
    transduce export runs/shakespeare --to onnx shakespeare-onnx
    transduce export runs/x --to ctranslate2 x-ct2 --quantization int8
    """
    from transduce.convert.exporting import export_run

    print_lines(export_run(run, to, out, quantization=quantization))
