"""The service under load, on loopback: throughput, latency, overload, leaks, shutdown, malformed requests.

    python benchmarks/serving.py all --run RUN --text test.en             # the numbers of docs/serving.md
    python benchmarks/serving.py mixed shutdown --run RUN --text test.en --scale 0.01

RUN is a run folder that translates; the text has one sentence per line. The server is `transduce serve` in a process of
its own with the options of `--serve=--OPTION=VALUE`, which may be repeated. `--scale` multiplies numbers of requests
and seconds. Exit code 1: a property does not hold (a wrong answer, a lost request, a 5xx, growing memory, a hang).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from serving_faults import byte_streams, malformed_requests, mixed, restart, shutdown
from serving_setup import BEAMS, Setup
from serving_speed import latency, overload, throughput

from transduce import DecodingOptions, Translator
from transduce.text.sentences import split_sentences

COMMANDS: dict[str, Callable[[Setup], bool]] = {
    "throughput": throughput, "latency": latency, "overload": overload, "mixed": mixed, "shutdown": shutdown,
    "restart": restart, "malformed": malformed_requests, "streams": byte_streams,
}  # fmt: skip


def main() -> None:
    """Translate offline, then run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=[*COMMANDS, "all"])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=1000, help="sentences to use; throughput needs 1,000")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--serve", action="append", default=[], metavar="--OPTION=VALUE", help="of transduce serve")
    args = parser.parse_args()
    lines = list(dict.fromkeys(args.text.read_text().splitlines()))
    lines = [line for line in lines if len(split_sentences(line, "en")) == 1][: args.lines]
    precision = dict(o.removeprefix("--").split("=") for o in args.serve).get("precision", "float32")
    translator = Translator.load(args.run, precision=precision)
    expected = {
        beam: [one.text for one in translator.translate(lines, DecodingOptions(beam=beam or None))]
        for beam in (0, *BEAMS)  # 0: the run's
    }
    del translator
    setup = Setup(args.run, lines, expected, args.serve, args.scale)
    names = list(COMMANDS) if "all" in args.commands else args.commands
    good = [COMMANDS[name](setup) for name in names]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
