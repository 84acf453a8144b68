"""`transduce generate`, `fill` and `classify`: what language models and encoders do with text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from transduce.cli import options as opt
from transduce.cli.output import print_lines, to_json
from transduce.cli.translate import STDIN, load_with_notes
from transduce.config.decoding import OF_SEARCH, DecodingOptions

if TYPE_CHECKING:
    from transduce.decoding.results import Generation

_CHUNK = 1000  # lines that are classified before the first result is printed


@opt.expand_decoding(
    without=(*OF_SEARCH, "scores", "batch_tokens"), flags={"n_best": "--samples"}, fixed={"sample": True}
)
def generate(
    run: opt.Run,
    prompt: Annotated[
        list[str] | None, opt.option("--prompt", "-p", help="Text to continue (default: stdin); repeatable.")
    ] = None,
    stream: Annotated[bool, Option("--stream", help="Print the text while it is generated.")] = False,
    cut_prompt: Annotated[
        bool, Option("--cut-prompt", help="Cut the start of a prompt that is too long for the model.")
    ] = False,
    memory: opt.Memory = None,
    device: opt.Device = "auto",
    precision: opt.Precision = "float32",
    json: opt.Json = False,
    *,
    decoding: DecodingOptions,
) -> None:
    """Generate text from a prompt. Multiple outputs are separated by `---`.

    \b
    transduce generate runs/book --prompt "Once upon a time" --temperature 0.8
    echo "Once upon" | transduce generate runs/book --samples 3 --json
    """
    from transduce.data.lines import read_lines
    from transduce.decoding.generator import Generator
    from transduce.errors import SettingsError

    generator = load_with_notes(partial(Generator.load, memory=memory), run, device, precision)
    prompts = prompt if prompt is not None else ["\n".join(read_lines(STDIN))]
    if stream:
        if json or len(prompts) * decoding.n_best > 1:
            raise SettingsError("--stream prints a single text: not with --json, --samples or several prompts")
        print_lines(_streamed(prompts[0], generator.stream(prompts[0], decoding, cut_prompt=cut_prompt)), end="")
        return
    found = generator.generate(prompts, decoding, cut_prompt=cut_prompt)
    if json:
        print_lines(map(_to_json, found))
    else:
        print_lines(["---\n".join(f"{one.prompt}{one.text}\n" for one in found)], end="")


def _to_json(one: Generation) -> str:
    numbers = {"n_tokens": len(one.ids), "log_prob": one.log_prob, "finished": one.finished}
    return to_json({"prompt": one.prompt, "text": one.text, **numbers})


def fill(
    run: opt.Run,
    texts: Annotated[
        list[str] | None, opt.argument("TEXT", "Text with <mask> for each token to predict (default: stdin).")
    ] = None,
    top: Annotated[int, Option(help="Candidates per mask.", min=1)] = 5,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Predict masked tokens with a run of task "masked". Prints PROBABILITY, TOKEN and TEXT.

    \b
    transduce fill runs/bert "The capital of France is <mask>."
    transduce fill runs/bert --top 10 --json < texts.txt
    """
    from dataclasses import asdict

    from transduce.data.lines import read_lines
    from transduce.decoding.mask_filler import MaskFiller

    found = MaskFiller.load(run, device=device).fill(list(read_lines(STDIN)) if texts is None else texts, top=top)
    if json:
        print_lines(to_json(asdict(one)) for one in found)
        return
    for one in found:
        for number, candidates in enumerate(one.masks, 1):
            head = [f"mask {number}:"] if len(one.masks) > 1 else []
            print_lines([*head, *(f"{c.probability:6.1%}  {c.token}\t{c.text}" for c in candidates)])


def classify(
    run: opt.Run,
    file: Annotated[Path | None, opt.argument("FILE", "Text, or text<TAB>text (default: stdin).")] = None,
    device: opt.Device = "auto",
    json: opt.Json = False,
) -> None:
    """Predict the label of each line of text. Prints LABEL<TAB>PROBABILITY.

    \b
    transduce classify runs/sst2 reviews.txt > labels.tsv
    echo "a fine film" | transduce classify runs/sst2 --json
    """
    from dataclasses import asdict
    from itertools import islice

    from transduce.data.lines import read_inputs
    from transduce.decoding.classifier import TextClassifier
    from transduce.logging import Log

    classifier = TextClassifier.load(run, device=device)
    lines, n_cut = read_inputs(file or STDIN, classifier.vocabulary), 0
    while chunk := list(islice(lines, _CHUNK)):
        found = classifier.classify([tuple(line.split("\t")) for line in chunk])
        n_cut += sum(one.full for one in found)
        print_lines(to_json(asdict(one)) if json else f"{one.label}\t{one.probability:.4f}" for one in found)
    if n_cut:
        Log().warn(f"{n_cut:,} texts fill or exceed the {classifier.longest} tokens of the model; the rest is cut off")


def _streamed(prompt: str, parts: Iterator[str]) -> Iterator[str]:
    yield prompt
    yield from parts
    yield "\n"
