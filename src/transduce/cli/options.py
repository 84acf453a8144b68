"""Options that several commands share, each defined once. The options of a training are in `request.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Run = Annotated[Path, Argument(metavar="RUN", help="Run folder.", show_default=False)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print warnings only.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, Option("--json", help="Print JSON, one object per line.")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. training.lr=0.001; repeatable.", show_default=False
    ),
]
Processes = Annotated[
    int,
    Option("--processes", help="Worker processes on this machine, e.g. one per GPU; they share every batch.", min=1),
]

Beam = Annotated[
    int | None, Option(help="Number of beams; 1 is greedy (default: the run's setting).", min=1, show_default=False)
]
LengthPenalty = Annotated[
    float | None,
    Option(
        "--length-penalty", help="Exponent of the length (default: the run's setting).", min=0.0, show_default=False
    ),
]
MaxLength = Annotated[
    int | None,
    Option("--max-length", help="Maximum output length in tokens (default: the run's setting).", min=1,
           show_default=False),
]  # fmt: skip
BatchTokens = Annotated[
    int | None,
    Option("--batch-tokens", help="Source tokens per batch (default: the run's setting).", min=1, show_default=False),
]
TopK = Annotated[int, Option("--top-k", help="Sample from the k most likely tokens; 0 means all.", min=0)]
TopP = Annotated[
    float,
    Option("--top-p", help="Sample from the most likely tokens with total probability p.", min=0.0, max=1.0),
]
Seed = Annotated[int, Option(help="Random seed of sampling.", min=0)]
Tokenize = Annotated[
    str | None,
    Option(help="BLEU tokenizer: 13a, none, zh, char, ... (default: the run's setting).", show_default=False),
]
Lowercase = Annotated[
    bool | None,
    Option(
        "--lowercase/--cased", help="Ignore case in BLEU and chrF (default: the run's setting).", show_default=False
    ),
]
