"""`transduce evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from transduce.cli import options as opt
from transduce.cli.output import check_output, print_lines, to_json

_SEARCH = frozenset({"--beam", "--max-length", "--length-penalty", "--batch-tokens"})
"""Options without effect if the translations are given."""
_INPUTS = {"--src": "--src and --ref", "--text": "--text", "--labels": "--labels"}


def evaluate(
    run: opt.Run,
    src: Annotated[Path | None, opt.option(metavar="FILE", help="Source text.")] = None,
    ref: Annotated[
        Path | None, opt.option(metavar="FILE", help="Reference translations, aligned line by line.")
    ] = None,
    text: Annotated[Path | None, opt.option(metavar="FILE", help="Plain text, for a language model.")] = None,
    labels: Annotated[Path | None, opt.option(metavar="FILE", help="Labelled text: label<TAB>text lines.")] = None,
    stride: Annotated[
        int | None,
        opt.option(
            help="With --text: new tokens per row; fewer give more context (default: rows do not overlap).", min=1
        ),
    ] = None,
    hyp: Annotated[
        Path | None, opt.option(metavar="FILE", help="Score these translations instead of those of RUN.")
    ] = None,
    against: Annotated[
        Path | None, opt.option(metavar="RUN|FILE", help="Compare with another run or its output (paired bootstrap).")
    ] = None,
    tokenize: opt.Tokenize = None,
    lowercase: opt.Lowercase = None,
    output: Annotated[
        Path | None, opt.option("--output", "-o", metavar="FILE", help="Write the translations to FILE.")
    ] = None,
    beam: opt.Beam = None,
    max_length: opt.MaxLength = None,
    length_penalty: opt.LengthPenalty = None,
    batch_tokens: opt.BatchTokens = None,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Compute BLEU, chrF and TER, perplexity, or label accuracy.

    \b
    transduce evaluate runs/x --src test.en --ref test.de
    transduce evaluate runs/x --src test.en --ref test.de --against runs/y
    transduce evaluate runs/x --src test.tok.en --ref test.tok.de --tokenize none --json
    transduce evaluate runs/book --text other.txt
    transduce evaluate runs/bert --text other.txt
    transduce evaluate runs/sst2 --labels dev.tsv
    """
    given = {
        "--src": src,
        "--ref": ref,
        "--text": text,
        "--labels": labels,
        "--stride": stride,
        "--hyp": hyp,
        "--against": against,
        "--tokenize": tokenize,
        "--lowercase or --cased": lowercase,
        "--output": output,
        "--beam": beam,
        "--max-length": max_length,
        "--length-penalty": length_penalty,
        "--batch-tokens": batch_tokens,
    }
    task = _check_options({name for name, value in given.items() if value is not None}, run, against)
    check_output(output)
    from transduce.evaluation import evaluate as evaluation

    scores: Any
    if labels is not None:
        from transduce.decoding.classifier import TextClassifier

        scores = evaluation.evaluate_labels(TextClassifier.load(run, device=device), labels)
    elif text is not None:
        scores = _text_scores(run, task, text, stride=stride, batch_tokens=batch_tokens, device=device)
    else:
        assert src is not None and ref is not None  # see _check_options
        from transduce.decoding.options import TranslationOptions
        from transduce.decoding.translator import Translator

        options = TranslationOptions(
            beam=beam, max_length=max_length, length_penalty=length_penalty, batch_tokens=batch_tokens
        )

        def translate(system: Path, sources: Sequence[str]) -> list[str]:
            return [found.text for found in Translator.load(system, device=device).translate(sources, options)]

        scores = evaluation.evaluate_translations(
            run,
            (src, ref),
            translate=translate,
            hypotheses=hyp,
            against=against,
            tokenize=tokenize,
            lowercase=lowercase,
            output=output,
        )
    print_lines([to_json(scores.to_json())] if json else scores.lines())


def _text_scores(run: Path, task: str, text: Path, *, stride: int | None, batch_tokens: int | None, device: str) -> Any:
    """Perplexity of a language model, or accuracy of a masked one, on a text file (`-`: stdin)."""
    if task == "masked":
        from transduce.decoding.mask_filler import MaskFiller

        return MaskFiller.load(run, device=device).evaluate(text, batch_tokens=batch_tokens)
    from transduce.data.encoding import encode_text
    from transduce.data.text import read_pieces
    from transduce.decoding.generator import Generator

    generator = Generator.load(run, device=device)
    pieces = read_pieces(text, generator.settings.data.documents)
    store = encode_text(None, pieces, generator.tokenizer, name=str(text))
    return generator.evaluate(store, stride=stride, batch_tokens=batch_tokens)


def _check_options(given: set[str], run: Path, against: Path | None) -> str:
    """Return the task of the run. Refuse missing inputs, inputs of another task, and options without effect."""
    from transduce.errors import SettingsError
    from transduce.runs.folder import RunFolder
    from transduce.tasks.registry import TASK_INFOS

    inputs = [name for name in _INPUTS if name in given]
    if len(inputs) != 1 or (inputs == ["--src"]) != ("--ref" in given):
        raise SettingsError(
            "evaluate needs --src and --ref (translator), --text (language model or masked model) or --labels "
            "(classifier)"
        )
    name = RunFolder.open(run).settings.task
    if (task := TASK_INFOS.get(name)) is None:  # reported when the model is loaded
        return name
    if task.evaluated_on != inputs[0]:
        how = f"; evaluate it with {_INPUTS[task.evaluated_on]}" if task.evaluated_on else ""
        raise SettingsError(f"{run}: a run of task '{name}', whose model {task.wording.usage}{how}")
    allowed, where = task.evaluate_options | {task.evaluated_on}, f"for a run of task '{name}'"
    if "--hyp" in given and not given - allowed and (against is None or not against.is_dir()):
        allowed, where = allowed - _SEARCH, "if --hyp gives the translations"
    if unused := sorted(given - allowed):
        raise SettingsError(f"{', '.join(unused)}: no effect {where}; remove it")
    return name
