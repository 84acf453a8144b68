"""`transduce demo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from transduce.cli.options import Overrides, Quiet
from transduce.cli.output import print_lines

# Settings that translate about 98 % of held-out sentences exactly after 2,000 updates, in float32 and in bfloat16. What
# is otherwise chosen by speed or free memory is fixed, so that everyone gets the same model but for rounding.
DEMO: dict[str, dict[str, Any]] = {
    "data": {"demo": 60_000, "src_lang": "en", "tgt_lang": "de"},
    "tokenizer": {"kind": "unigram", "vocab_size": 2000},
    "model": {"preset": "tiny", "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0, "residual": "pre"},
    "training": {
        "batch_tokens": 2048,
        "micro_batch_tokens": 2048,
        "optimizer": "muon",
        "schedule": "cosine",
        "warmup_updates": 50,
        "valid_updates": 200,
        "valid_bleu_sentences": 100,
        "stop_by": "loss",  # BLEU of 100 sentences is near 100 early and noisy after that
    },
    "decoding": {"beam": 2, "max_length": 64},
}
N_SHOWN = 8
SHOWN = "When will the old doctor call his friend?"
TITLES = {"test": "Held-out sentences", "held_out_combinations": "Combinations never seen in training"}


def demo(
    updates: Annotated[int, Option(help="Number of training updates.", min=1)] = 2000,
    run: Annotated[Path, Option("--run", metavar="FOLDER", help="Run folder.")] = Path("runs/demo"),
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Train on a built-in corpus; show translations and attention.

    Takes a few minutes. The number of updates is fixed, so a slower machine takes longer and gets the same model.

    \b
    transduce demo
    transduce demo --updates 8000 --run runs/longer
    """
    from transduce.config.kinds import MODEL_SETTINGS, kinds_for
    from transduce.config.recipe import apply_overrides
    from transduce.config.settings import Settings
    from transduce.errors import SettingsError
    from transduce.logging import Log
    from transduce.pipeline import train

    values: dict[str, Any] = {section: dict(content) for section, content in DEMO.items()}
    asked: dict[str, Any] = {}
    apply_overrides(asked, overrides)
    given = Settings.from_mapping(asked)
    kind, kinds = given.model.kind, kinds_for("translation")
    if given.task != "translation" or kind not in kinds:
        wanted = f"task = '{given.task}', model.kind = '{kind}'"
        raise SettingsError(f"{wanted}: the demo trains a translator; allowed kinds: {', '.join(kinds)}")
    if kind != "transformer":  # which has the model above
        values["model"] = {"preset": next(iter(MODEL_SETTINGS[kind].presets)), "dropout": 0.0}
    values["name"] = "demonstration"
    values["training"]["max_updates"] = updates
    apply_overrides(values, overrides)
    folder = train(Settings.from_mapping(values), run, log=Log(quiet=quiet))
    print_lines(_results(folder), colours=True)


def _results(folder: Path) -> Iterator[str]:
    """Yield lines with translations next to their references, scores, and attention."""
    from transduce.decoding.translator import Translator
    from transduce.evaluation.result_files import read_record
    from transduce.inspection.look import inspect
    from transduce.inspection.pictures import show_attention
    from transduce.runs.folder import RunFolder

    record = read_record(RunFolder.open(folder))
    for found in record.samples:
        yield f"\n{TITLES.get(found['name'], found['name'])}, the first {N_SHOWN}:\n"
        for sample in found["samples"][:N_SHOWN]:
            right = sample["hyp"] == sample["ref"]
            yield f"  {sample['src']}\n    {'=' if right else '≠'} {sample['hyp']}"
            if not right:
                yield f"      {sample['ref']}  (reference)"
    yield "\nScores:\n"
    for scored in record.scores:
        yield f"  {TITLES.get(scored.name, scored.name)}"
        yield from (f"    {line}" for line in scored.scores.lines())
    inspection = inspect(Translator.load(folder), SHOWN)
    if inspection.recorded["attention"]:  # not of every architecture
        yield "\nCross-attention (rows: target; columns: source):\n"
        yield show_attention(inspection)
    yield f"\nRun folder (the model): {folder}\nReport for a browser: {folder / 'report.html'}"
    yield f'Try: echo "{SHOWN}" | transduce translate {folder}'
