"""`transduce evaluate`. Its options are those of the classes in `evaluation.options`, one for each task."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from transduce.cli import options as opt
from transduce.cli.output import check_output, print_lines, to_json
from transduce.config.decoding import OF_SAMPLES, DecodingOptions
from transduce.errors import SettingsError
from transduce.evaluation.options import EVALUATION_OPTIONS

_NAMES = {
    "lowercase": ("--lowercase/--cased",),
    "output": ("--output", "-o"),
    "measure_precisions": ("--measure-precisions",),  # without --no-measure-precisions
}
"""Options whose names do not follow from the names of the fields."""


def _options_of_all_tasks() -> Iterator[inspect.Parameter]:
    """The evaluation options of all tasks; None unless given."""
    hints: dict[str, Any] = {}
    for options in EVALUATION_OPTIONS.values():
        hints |= get_type_hints(options, include_extras=True)
    hints.pop("decoding")
    for name, hint in hints.items():
        kind, text, *least = get_args(hint)
        metavar = "FILE" if Path in (kind, *get_args(kind)) else None
        option = opt.option(*_NAMES.get(name, ()), help=text, metavar=metavar, min=least[0] if least else None)
        annotation: Any = Annotated[kind | None, option]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@opt.expand_decoding(without=(*OF_SAMPLES, "sample", "n_best", "scores", "batch_tokens"))
@opt.replacing("given", _options_of_all_tasks(), dict)
def evaluate(
    run: opt.Run,
    given: dict[str, Any],
    *,
    decoding: DecodingOptions,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Compute BLEU, chrF and TER, perplexity, or label accuracy.

    \b
    transduce evaluate runs/x --src test.en --ref test.de
    transduce evaluate runs/x --src test.en --ref test.de --against runs/y
    transduce evaluate runs/y --src v.en --ref v.de --measure-precisions
    transduce evaluate runs/x --src test.tok.en --ref test.tok.de --tokenize none
    transduce evaluate runs/book --text other.txt
    transduce evaluate runs/xl --text other.txt --memory 1000
    transduce evaluate runs/bert --text other.txt
    transduce evaluate runs/sst2 --labels dev.tsv
    """
    from transduce.runs.folder import RunFolder

    given = {name: value for name, value in given.items() if value is not None}
    output = given.get("output")
    check_output(output, *(value for value in given.values() if isinstance(value, Path) and value is not output))
    name = RunFolder.open(run).settings.task
    options = _options_of(name, given, decoding)

    from transduce.tasks.registry import find_task

    scores = find_task(name).evaluate(run, options, device=device)
    print_lines([to_json(scores.to_json())] if json else scores.lines())


def _options_of(task: str, given: Mapping[str, Any], decoding: DecodingOptions) -> Any:
    """The options of a task. Refuses those that the task does not have."""
    if task not in EVALUATION_OPTIONS:
        raise SettingsError(f"a run of task '{task}' cannot be evaluated; fine-tune it first")
    own = fields(EVALUATION_OPTIONS[task])
    names = {field.name for field in own}
    required = [field.name for field in own if field.default is field.default_factory is MISSING]
    needed = " and ".join(map(_flag, required))
    of_decoding = set() if "decoding" in names else decoding.model_fields_set
    if unused := sorted((given.keys() - names) | of_decoding):
        flags = ", ".join(map(_flag, unused))
        raise SettingsError(f"{flags}: no effect for a run of task '{task}'; evaluate it with {needed}")
    if not given.keys() >= set(required):
        raise SettingsError(f"a run of task '{task}' is evaluated with {needed}")
    return EVALUATION_OPTIONS[task](**given, **({"decoding": decoding} if "decoding" in names else {}))


def _flag(name: str) -> str:
    return _NAMES.get(name, (opt.flag_of(name),))[0]
