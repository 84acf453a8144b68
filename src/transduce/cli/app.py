"""The commands. Heavy imports stand inside them, so that `--help` is instant; what they do is in `run.py`.

A command has as many parameters as it has options, which is more than the eight that a function may have elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from transduce.cli import convert as cli_exchange
from transduce.cli import encoder as cli_encoder
from transduce.cli.arguments import take_text_only
from transduce.cli.doctor import doctor
from transduce.cli.evaluate import evaluate
from transduce.cli.generate import generate
from transduce.cli.options import (
    BatchTokens,
    Beam,
    Both,
    Device,
    Extend,
    From,
    Json,
    Longest,
    NewRun,
    Paths,
    Penalty,
    Processes,
    Quiet,
    Recipe,
    Root,
    Run,
    Set,
    Sources,
    SrcLang,
    Targets,
    Texts,
    TgtLang,
)
from transduce.cli.output import print_lines
from transduce.cli.verify import verify

if TYPE_CHECKING:
    from transduce.runs.folder import RunFolder
    from transduce.training.ranks import Link

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> bool:
    if asked:
        import transduce

        print(f"transduce {transduce.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _all(
    debug: Annotated[bool, Option("--debug", help="A traceback with every error (also: TRANSDUCE_DEBUG=1).")] = False,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """From raw parallel text to a translator.

    \b
    transduce demo                                        the first thing to run
    transduce train --src a.en --tgt a.de --run runs/x    on your own text
    echo "A dog." | transduce translate runs/x
    """


@app.command()
def demo(
    minutes: Annotated[float, Option(help="Minutes of training.", min=0.01)] = 2.5,
    run: Annotated[Path, Option("--run", metavar="FOLDER", help="Where the run folder goes.")] = Path("runs/demo"),
    overrides: Set = None,
    quiet: Quiet = False,
) -> None:
    """Train on the built-in corpus for two and a half minutes, translate, and show what came of it.

    \b
    transduce demo
    transduce demo --minutes 10 --run runs/longer
    """
    from transduce.cli.showcase import demo as run_demo
    from transduce.logging import Log

    print_lines(run_demo(run, minutes=minutes, overrides=overrides or (), log=Log(quiet=quiet)))


@app.command()
def train(
    recipe: Recipe = None,
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
    dry_run: Annotated[bool, Option("--dry-run", help="Read, choose, say what would be done, and stop.")] = False,
    processes: Processes = 1,
    quiet: Quiet = False,
) -> None:
    """Train a translator, or a language model on plain text.

    What is not said is chosen from the data and the machine, and printed with its reason.

    The same command again goes on with an interrupted run. Text files may be .gz, .xz or .zst.

    \b
    transduce train --src train.en --tgt train.de --run runs/x
    transduce train --path memory.tmx --src-lang en --tgt-lang de --run runs/tm
    transduce train recipes/multi30k-en-de.toml --data multi30k --set training.lr=0.003
    transduce train --text book.txt --run runs/book
    transduce train --from runs/x --src new.en --tgt new.de --run runs/y --extend-vocabulary 500
    transduce train --src a.en --tgt a.de --run runs/x --processes 2
    """
    from transduce.cli.request import Request
    from transduce.distributed import launch

    launch.follow_if_asked(_learn_as_worker)
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
    settings, folder = request.settings(), request.run_folder()
    launch.launch_if_asked(1 if dry_run else processes)

    from transduce.logging import Log
    from transduce.pipeline import train as run_train

    run_train(settings, folder, log=Log(quiet=quiet), dry_run=dry_run)


app.command()(doctor)


def _learn_as_worker(folder: RunFolder, link: Link, device: str) -> None:
    from transduce.pipeline import learn_as_worker

    learn_as_worker(folder, link, device)


@app.command()
def translate(
    run: Run,
    files: Annotated[
        list[Path] | None, Argument(metavar="FILE...", help="Text; default: stdin.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A file instead of stdout; FILE.partial if an error cuts it short.",
            show_default=False,
        ),
    ] = None,
    beam: Beam = None,
    nbest: Annotated[int, Option(help="Translations a line, each as NUMBER<TAB>SCORE<TAB>TEXT.", min=1)] = 1,
    scores: Annotated[bool, Option("--scores", help="SCORE<TAB>TEXT.")] = False,
    json: Json = False,
    max_length: Longest = None,
    length_penalty: Penalty = None,
    sample: Annotated[bool, Option("--sample", help="Draw translations instead of searching the best.")] = False,
    temperature: Annotated[float, Option(help="Of sampling; below 1 is sharper.", min=0.001)] = 1.0,
    top_k: Annotated[int, Option("--top-k", help="Sample among the k likeliest; 0: all.", min=0)] = 0,
    top_p: Annotated[
        float, Option("--top-p", help="Sample among the likeliest that sum to p.", min=0.0, max=1.0)
    ] = 1.0,
    seed: Annotated[int, Option(help="Of sampling.", min=0)] = 1,
    batch_tokens: BatchTokens = None,
    device: Device = "auto",
) -> None:
    """Translate text, line for line; empty lines stay empty.

    \b
    transduce translate runs/x < in.en > out.de
    transduce translate runs/x in.en.gz -o out.de --beam 1
    transduce translate runs/x in.en --nbest 5 --json
    """
    from transduce.cli import use
    from transduce.decoding.sample import Sampling
    from transduce.errors import SettingsError
    from transduce.logging import Log

    if not sample and (temperature, top_k, top_p) != (1.0, 0, 1.0):
        raise SettingsError("--temperature, --top-k and --top-p are for drawing translations; add --sample")
    search = use.Search(
        beam=beam,
        n_best=nbest,
        max_length=max_length,
        length_penalty=length_penalty,
        batch_tokens=batch_tokens,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p) if sample else None,
        seed=seed,
    )
    style = "json" if json else "nbest" if nbest > 1 else "scores" if scores else "text"
    lines = use.translate(run, files or [use.STDIN], search=search, style=style, device=device, log=Log())
    use.write_lines(output, lines) if output else print_lines(lines)


app.command()(evaluate)
app.command()(generate)
app.command()(cli_encoder.fill)
app.command()(cli_encoder.classify)


@app.command()
def score(
    run: Run,
    src: Annotated[Path, Option(metavar="FILE", help="Source text.", show_default=False)],
    tgt: Annotated[Path, Option(metavar="FILE", help="Translations to score, line for line.", show_default=False)],
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Log-probabilities that a run gives to translations: one number a line.

    \b
    transduce score runs/x --src in.en --tgt in.de
    transduce score runs/x --src in.en --tgt in.de --json
    """
    from transduce.cli import use

    print_lines(use.score(run, (src, tgt), device=device, as_json=json))


@app.command()
def inspect(
    run: Run,
    sentence: Annotated[str, Argument(help="A source sentence.", show_default=False)],
    tgt: Annotated[
        str | None, Option(help="A translation to look at instead of the run's.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Every layer and head, as one offline page.", show_default=False)
    ] = None,
    svg: Annotated[Path | None, Option(metavar="FILE", help="A picture of the alignment.", show_default=False)] = None,
    device: Device = "auto",
) -> None:
    """See where the model looks while it translates a sentence.

    \b
    transduce inspect runs/x "A dog runs."
    transduce inspect runs/x "A dog runs." --html dog.html
    """
    from transduce.cli.showcase import inspect as run_inspect

    print_lines([run_inspect(run, sentence, tgt=tgt, html=html, svg=svg, device=device)])


app.command()(verify)
app.command("import")(cli_exchange.import_model)
app.command("export")(cli_exchange.export_model)
take_text_only(app)
