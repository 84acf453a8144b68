"""The commands `transduce import` and `transduce export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from transduce.cli.options import Quiet, Run, argument, option, print_lines


def import_model(
    source: Annotated[
        str, argument("SOURCE", "Model folder, *.argosmodel, Marian's *.npz or *.bin, or OWNER/NAME on the Hub.")
    ],
    run: Annotated[Path, argument("RUN", "Run folder to create.")],
    revision: Annotated[str | None, option("Branch, tag or commit of OWNER/NAME (default: main).")] = None,
    base: Annotated[
        Path | None, option("For adapters of PEFT, the run folder of the model that they belong to.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Create a run folder from a model of transformers, Marian, CTranslate2 or Argos Translate, or adapters of PEFT.

    The kind of model is detected from the files. Supported models of transformers are Marian, M2M-100, NLLB, mBART,
    BART, T5, mT5, MADLAD-400, BERT and GPT-2. Their folder contains config.json, weights (safetensors or
    pytorch_model.bin) and the vocabulary. A folder of CTranslate2 contains model.bin, the vocabularies and the
    SentencePiece models. A model of Marian, such as OPUS-MT's and Firefox's, is a file *.npz or *.bin, with the
    vocabularies in its folder. Unless there is a folder OWNER, OWNER/NAME is downloaded from the Hugging Face Hub, with
    weights only from safetensors or model.bin.

    \b
    transduce import openai-community/gpt2 runs/gpt2
    transduce import opus-mt-en-de runs/opus
    transduce import facebook/nllb-200-distilled-600M runs/nllb
    transduce import translate-en_de-1_9.argosmodel runs/en-de
    transduce import model.ende.intgemm.alphas.bin runs/firefox
    transduce import nllb-medical-lora runs/medical --base runs/nllb
    transduce translate runs/opus < in.en > out.de
    """
    from transduce.convert.importing import import_run

    print_lines(import_run(source, run, revision=revision, base=base, quiet=quiet))


def export_model(
    run: Run,
    out: Annotated[Path, argument("OUT", "Folder to create; for argos, a package *.argosmodel.")],
    to: Annotated[str, option("Format: huggingface, peft, ctranslate2 or argos.")],
    quantization: Annotated[
        str | None, option("For ctranslate2 and argos: int8, int16, float16, ... (default: none).")
    ] = None,
) -> None:
    """Export a model to transformers, CTranslate2 or Argos Translate.

    The outputs are compared with the run's outputs. In transformers, a translator trained here becomes a MarianMTModel,
    a language model a GPT2LMHeadModel, and an encoder a BERT model. An imported model returns to its original class,
    and mT5 and MADLAD-400 become T5. A setting that the format cannot express is refused by name: for transformers,
    train a translator with model.residual=post and a language model with model.positions=learned. CTranslate2 supports
    Transformers that translate. A package of Argos Translate contains a model of CTranslate2. The format peft exports
    the adapters that a run has kept (training.lora.merge=false).

    \b
    transduce export runs/x --to huggingface x-marian
    transduce export runs/shakespeare --to huggingface shakespeare-gpt2
    transduce export runs/x --to ctranslate2 x-ct2 --quantization int8
    transduce export runs/x --to argos translate-en_de.argosmodel
    transduce export runs/small --to peft nllb-lora
    """
    from transduce.convert.exporting import export_run

    print_lines(export_run(run, to, out, quantization=quantization))


def push(
    run: Annotated[Path, argument("RUN", "Run folder to publish.")],
    name: Annotated[str, argument("OWNER/NAME", "Model on the Hub; created if it does not exist.")],
    license: Annotated[str | None, option("Licence for the model card, such as mit or cc-by-4.0.")] = None,
    private: Annotated[bool, Option("--private", help="Make a new model private.")] = False,
    records: Annotated[bool, Option("--records", help="Also send the report, scores, samples and metrics.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="List the files, and send nothing.")] = False,
) -> None:
    """Publish a run folder on the Hugging Face Hub; other commands then load it by its name.

    Sends the files of the model, recipe.toml and the model card. The settings and recipe.toml contain the names of the
    training files. The token comes from hf auth login or HF_TOKEN.

    \b
    transduce push runs/x alice/en-de --dry-run
    transduce push runs/x alice/en-de --license cc-by-4.0
    transduce translate alice/en-de < in.en > out.de
    """
    from transduce.convert.publishing import push_to_hub

    sizes = push_to_hub(run, name, license=license, private=private or None, records=records, dry_run=dry_run)
    print_lines(f"{file}: {size:,} bytes" for file, size in sizes.items())
    print_lines([f"nothing was sent to {name}" if dry_run else f"published: {name}"])
