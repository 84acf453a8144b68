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
From = Annotated[
    Path | None,
    Option("--from", metavar="RUN", help="Fine-tune: begin with another run's model.", show_default=False),
]
Extend = Annotated[
    int | None,
    Option("--extend-vocabulary", metavar="N", help="With --from: learn N pieces more at most.", show_default=False),
]
