"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Run = Annotated[Path, Argument(metavar="RUN", help="Run folder: the model.", show_default=False)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Only warnings on stderr.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, Option("--json", help="JSON, one object a line.")]
Paths = Annotated[list[Path] | None, Option(metavar="FILE", show_default=False)]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Any setting, as in training.lr=0.001; repeatable.", show_default=False),
]
Beam = Annotated[
    int | None, Option(help="Hypotheses kept; 1 is greedy; default: the run's.", min=1, show_default=False)
]
Penalty = Annotated[
    float | None,
    Option("--length-penalty", help="Exponent of the length; default: the run's.", min=0.0, show_default=False),
]
Longest = Annotated[
    int | None, Option("--max-length", help="Longest output in tokens; default: the run's.", min=1, show_default=False)
]
BatchTokens = Annotated[
    int | None, Option("--batch-tokens", help="Source tokens at once; default: the run's.", min=1, show_default=False)
]
Tokenize = Annotated[
    str | None, Option(help="BLEU's: 13a, none, zh, char, ...; default: the run's.", show_default=False)
]
Lowercase = Annotated[
    bool | None, Option("--lowercase/--cased", help="Fold case; default: the run's.", show_default=False)
]

Recipe = Annotated[Path | None, Argument(metavar="RECIPE", help="Settings, a TOML file.", show_default=False)]
Sources = Annotated[
    list[Path] | None,
    Option("--src", metavar="FILE", help="Source, a sentence a line; repeatable.", show_default=False),
]
Targets = Annotated[
    list[Path] | None, Option("--tgt", metavar="FILE", help="Target, line for line with --src.", show_default=False)
]
Both = Annotated[
    list[Path] | None,
    Option("--path", metavar="FILE", help="Both sides in one file: .tsv, .jsonl or .tmx.", show_default=False),
]
Texts = Annotated[
    list[Path] | None,
    Option(
        "--text",
        metavar="FILE",
        help="Plain text, to train a model that goes on with text; repeatable.",
        show_default=False,
    ),
]
SrcLang = Annotated[str | None, Option("--src-lang", help="Language code, as in a TMX file.", show_default=False)]
TgtLang = Annotated[str | None, Option("--tgt-lang", help="Language code of the target.", show_default=False)]
NewRun = Annotated[
    Path | None, Option("--run", metavar="FOLDER", help="Run folder; default: runs/RECIPE.", show_default=False)
]
From = Annotated[
    Path | None,
    Option("--from", metavar="RUN", help="Fine-tune: begin with another run's model.", show_default=False),
]
Extend = Annotated[
    int | None,
    Option("--extend-vocabulary", metavar="N", help="With --from: learn N pieces more at most.", show_default=False),
]
Processes = Annotated[
    int, Option("--processes", help="Processes on this machine that share every batch: one a GPU, or a core.", min=1)
]
Root = Annotated[
    Path | None, Option("--data", metavar="FOLDER", help="Where the recipe's data paths start.", show_default=False)
]
