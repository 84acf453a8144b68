"""`transduce distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from transduce.cli.options import Json, Overrides, Quiet, argument, option
from transduce.cli.output import print_lines, to_json


def distill(
    teacher: Annotated[Path, argument("TEACHER", "Run folder of the teacher, a translator.")],
    run: Annotated[Path, option(metavar="FOLDER", help="Run folder of the student.")],
    preset: Annotated[
        str | None, option(metavar="NAME", help="Sizes of the student, e.g. fast (default: as the teacher).")
    ] = None,
    overrides: Overrides = None,
    beam: Annotated[int, Option(help="Number of beams of the teacher.", min=1)] = 5,
    length_penalty: Annotated[
        float | None,
        option(help="Length penalty of the teacher; higher gives longer text (default: the teacher's).", min=0.0),
    ] = None,
    rerank: Annotated[
        bool, Option("--rerank", help="Of the beam's translations, take the one most similar to the reference.")
    ] = False,
    mix: Annotated[
        float, Option(help="Passes over the original pairs per pass over the translations; 0: none.", min=0.0)
    ] = 0.0,
    baseline: Annotated[
        Path | None,
        option(metavar="RUN", help="Compare with this run; if new, train the student in it without distillation."),
    ] = None,
    data: Annotated[
        Path | None, option(metavar="FOLDER", help="Folder of the teacher's training text, if it was moved.")
    ] = None,
    text: Annotated[
        Path | None,
        option(
            metavar="FOLDER", help="Folder for the translations, which students can share (default: RUN.distilled)."
        ),
    ] = None,
    precision: Annotated[str, Option(help="Precision of the teacher; see `transduce translate`.")] = "float32",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a small, fast student on the translations of a teacher.

    Translates the teacher's training text, trains the student on the result
    (with the teacher's tokenizer and settings, unless overridden) and compares
    both on the test sets: BLEU, speed, parameters. The same command resumes.

    \b
    transduce distill runs/teacher --run runs/student --preset fast
    transduce distill runs/teacher --run runs/student --rerank --mix 1
    transduce distill runs/teacher --run runs/student --baseline runs/plain
    """
    from transduce.config.recipe import apply_overrides
    from transduce.distillation.distill import distill as run_distill
    from transduce.distillation.text import DistillationOptions
    from transduce.logging import Log

    changes: dict[str, Any] = {} if preset is None else {"model": {"preset": preset}}
    apply_overrides(changes, overrides)
    options = DistillationOptions(beam=beam, length_penalty=length_penalty, rerank=rerank, mix=mix, precision=precision)
    found = run_distill(
        teacher, run, options, changes=changes, data=data, text=text, baseline=baseline, log=Log(quiet=quiet)
    )
    print_lines([to_json(found.to_json())] if json else found.lines())
