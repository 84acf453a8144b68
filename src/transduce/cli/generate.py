"""The commands of models on running text. As in `cli.py`, heavy imports stand inside."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from transduce.cli.options import Device, Json, Longest, Run
from transduce.cli.output import print_lines


def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None,
        Option("--prompt", "-p", help="What the text begins with; repeatable; default: stdin.", show_default=False),
    ] = None,
    max_length: Longest = None,
    temperature: Annotated[float, Option(help="Below 1 is sharper; 0: always the likeliest token.", min=0.0)] = 1.0,
    top_k: Annotated[int, Option("--top-k", help="Draw among the k likeliest tokens; 0: all.", min=0)] = 0,
    top_p: Annotated[float, Option("--top-p", help="Draw among the likeliest that sum to p.", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, Option(help="Of what is drawn.", min=0)] = 1,
    samples: Annotated[int, Option(help="Texts a prompt.", min=1)] = 1,
    stream: Annotated[bool, Option("--stream", help="Print the text as it comes.")] = False,
    cut_prompt: Annotated[
        bool, Option("--cut-prompt", help="Cut the beginning off a prompt that is too long for the model.")
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Go on with text: what a run of task "causal" does. Texts of several prompts or samples are parted by ---.

    \b
    transduce generate runs/book --prompt "Once upon a time" --temperature 0.8 --top-k 40
    echo "Once upon" | transduce generate runs/book --samples 3 --json
    """
    from transduce.cli import use

    asked = use.Asking(
        prompts=None if prompt is None else tuple(prompt),
        max_length=max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n_samples=samples,
        cut_prompt=cut_prompt,
    )
    print_lines(use.generate(run, asked, stream=stream, device=device, as_json=json), end="")
