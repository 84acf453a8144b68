"""The command that looks before a training is begun. As in `cli.py`, heavy imports stand inside."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from transduce.cli.options import (
    Both,
    Extend,
    From,
    NewRun,
    Paths,
    Processes,
    Quiet,
    Root,
    Set,
    Sources,
    SrcLang,
    Targets,
    Texts,
    TgtLang,
)
from transduce.cli.output import print_lines


def doctor(
    recipe: Annotated[
        Path | None,
        Argument(
            metavar="RECIPE|RUN", help="Settings, a TOML file; or a run folder that is there.", show_default=False
        ),
    ] = None,
    src: Sources = None,
    tgt: Targets = None,
    path: Both = None,
    text: Texts = None,
    valid_text: Paths = None,
    test_text: Paths = None,
    valid_src: Paths = None,
    valid_tgt: Paths = None,
    test_src: Paths = None,
    test_tgt: Paths = None,
    src_lang: SrcLang = None,
    tgt_lang: TgtLang = None,
    run: NewRun = None,
    start: From = None,
    extend: Extend = None,
    data: Root = None,
    overrides: Set = None,
    processes: Processes = 1,
    as_json: Annotated[bool, Option("--json", help="All that was found and measured, as one JSON object.")] = False,
    quiet: Quiet = False,
) -> None:
    """Look before a training: the data, the memory, the speed, the time, the disk. Takes the options of train.

    Reads a sample, makes a few updates in a process of its own, and keeps nothing, in about 20 seconds whatever the
    size of the corpus. Ends with "ready", or with a line for each obstacle and exit code 2. Of a run that is there it
    tells where it is and what remains.

    \b
    transduce doctor --src train.en --tgt train.de --run runs/x
    transduce doctor recipes/multi30k-en-de.toml --data multi30k --set model.preset=base
    transduce doctor --text book.txt --json
    transduce doctor --src train.en --tgt train.de --processes 2
    transduce doctor runs/x
    """
    began = time.monotonic()
    from transduce.cli.request import Request

    if recipe is not None and recipe.is_dir():
        from transduce.doctor.progress import asked_of
        from transduce.errors import SettingsError

        texts = (src, tgt, path, text, valid_text, test_text, valid_src, valid_tgt, test_src, test_tgt)
        if any((*texts, src_lang, tgt_lang, run, start, extend, data, overrides)):
            raise SettingsError(
                f"{recipe} is a run, and a run has its settings; of all options only --processes, --json and --quiet "
                "go with it"
            )
        settings, run = asked_of(recipe), recipe
    else:
        if run is None and recipe is None:
            run = Path("runs") / "new"
        request = Request(
            recipe=recipe,
            train=(tuple(src or ()), tuple(tgt or ())),
            valid=(tuple(valid_src or ()), tuple(valid_tgt or ())),
            test=(tuple(test_src or ()), tuple(test_tgt or ())),
            paths=tuple(path or ()),
            texts=(tuple(text or ()), tuple(valid_text or ()), tuple(test_text or ())),
            root=data,
            languages=(src_lang, tgt_lang),
            start=start,
            extend=extend,
            overrides=tuple(overrides or ()),
            run=run,
        )
        settings, run = request.settings(), request.run_folder()

    from transduce.doctor import examine
    from transduce.doctor.presentation import lines_of
    from transduce.logging import Log
    from transduce.process import exit_on_signals

    seconds = max(0.5 * examine.SECONDS, examine.SECONDS - (time.monotonic() - began))  # imports take some of them
    with exit_on_signals():
        found = examine.diagnose(
            settings, run=run, log=Log(quiet=quiet or as_json), seconds=seconds, processes=processes
        )
    print_lines([json.dumps(found.to_json(), ensure_ascii=False)] if as_json else lines_of(found))
    if not found.ready:
        raise typer.Exit(2)
