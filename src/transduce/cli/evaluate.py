"""The command that judges a run. As in `cli.py`, heavy imports stand inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from transduce.cli.options import BatchTokens, Beam, Device, Json, Longest, Lowercase, Penalty, Run, Tokenize
from transduce.cli.output import print_lines

_SEARCH = frozenset({"--beam", "--max-length", "--length-penalty", "--batch-tokens"})
_TAKES: dict[str, frozenset[str]] = {
    "translation": _SEARCH
    | {"--src", "--ref", "--hyp", "--against", "--tokenize", "--lowercase or --cased", "--output"},
    "causal": frozenset({"--text", "--stride", "--batch-tokens"}),
    "masked": frozenset({"--text", "--batch-tokens"}),
    "classification": frozenset({"--labels"}),
}
"""By the run's task: the options that have an effect, besides those of all."""
_TOLD = {"--src": "--src and --ref", "--text": "--text", "--labels": "--labels"}


def evaluate(
    run: Run,
    src: Annotated[Path | None, Option(metavar="FILE", help="Source text.", show_default=False)] = None,
    ref: Annotated[
        Path | None, Option(metavar="FILE", help="Reference translations, line for line.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None,
        Option(metavar="FILE", help="Text that a language model, or a masked one, is to tell.", show_default=False),
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
    way = _way({name for name, value in given.items() if value is not None}, run, against)
    from transduce.cli import use, use_encoder

    if labels is not None:
        lines = use_encoder.evaluate_labels(run, labels, device=device, as_json=json)
    elif text is not None and way == "masked":
        lines = use_encoder.evaluate_gaps(run, text, batch_tokens=batch_tokens, device=device, as_json=json)
    elif text is not None:
        lines = use.evaluate_text(run, text, stride=stride, batch_tokens=batch_tokens, device=device, as_json=json)
    else:
        assert src is not None and ref is not None, "as _way has seen"
        lines = use.evaluate(
            run,
            (src, ref),
            hypotheses=hyp,
            against=against,
            metric=(tokenize, lowercase),
            search=use.Search(
                beam=beam, max_length=max_length, length_penalty=length_penalty, batch_tokens=batch_tokens
            ),
            output=output,
            device=device,
            as_json=json,
        )
    print_lines(lines)


def _way(given: set[str], run: Path, against: Path | None) -> str:
    """The run's task, by which it is judged. Refuses what is not to be judged so, and options without effect."""
    from transduce.config.purposes import PURPOSES
    from transduce.errors import SettingsError
    from transduce.runs.folder import RunFolder

    ways = [name for name in ("--src", "--text", "--labels") if name in given]
    if len(ways) != 1 or (ways == ["--src"]) != ("--ref" in given):
        raise SettingsError(
            "evaluate needs --src and --ref of a translator, --text of a language model or a masked one, or --labels "
            "of a classifier"
        )
    task = RunFolder.open(run).settings.task
    purpose = PURPOSES.get(task)  # of an unknown one loading tells
    if purpose is not None and purpose.judged != ways[0]:
        how = f"; `transduce evaluate` judges it on {_TOLD[purpose.judged]}" if purpose.judged else ""
        raise SettingsError(f"{run} cannot do that: it {purpose.told()}{how}")
    takes, told = _TAKES.get(task, given), f"of task '{task}'"
    if "--hyp" in given and not given - takes and (against is None or not against.is_dir()):
        takes, told = takes - _SEARCH, "where --hyp gives the translations"
    if useless := sorted(given - takes):
        raise SettingsError(f"{', '.join(useless)}: no effect on a run {told}; leave it out")
    return task
