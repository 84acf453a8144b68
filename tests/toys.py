"""Complete training runs that are small enough for a test, also in a separate process that can be killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import transduce
from oracle import cases
from oracle.cases import VOCAB
from transduce.__main__ import main
from transduce.config.architectures import MODEL_SETTINGS
from transduce.config.recipe import apply_overrides
from transduce.config.settings import Settings, TrainingSettings
from transduce.data.store import Example, TokenStore
from transduce.distributed.group import join_ranks
from transduce.distributed.launch import this_process
from transduce.errors import Interrupted, RankExited
from transduce.logging import Log
from transduce.metrics_log import MetricsFile
from transduce.models.registry import build_model
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import Manifest
from transduce.tasks.base import open_prepared
from transduce.tasks.resolve import find_task
from transduce.training import loop
from transduce.training.feed import DataPosition, Feed, PairFeeder
from transduce.training.loop import Trainer
from transduce.training.loss import predict_tokens
from transduce.training.ranks import SINGLE_RANK, Ranks
from transduce.training.session import TrainingState
from transduce.training.step import Updater
from transduce.training.validate import Judge, Validator

CPU = torch.device("cpu")
FIRST = 4  # ids below are special

MODEL = {
    "d_model": 32, "d_ff": 64, "n_heads": 2, "n_encoder_layers": 1, "n_decoder_layers": 1, "dropout": 0.1,
    "d_hidden": 32, "d_conv": 32,
}  # fmt: skip
TRAINING = {
    "seed": 3, "batch_tokens": 256, "micro_batch_tokens": 100, "optimizer": "adam", "lr": 3e-3, "schedule": "linear",
    "warmup_updates": 10, "max_updates": 60, "valid_updates": 20, "precision": "float32", "device": "cpu",
}  # fmt: skip


def pairs(n: int, *, seed: int, vocab_size: int = 24, longest: int = 9, reverse: bool = False) -> TokenStore:
    """Random strings of ids and the same strings, or their mirror images."""
    draw = np.random.default_rng(seed)
    src = [draw.integers(FIRST, vocab_size, size=draw.integers(1, longest + 1)).tolist() for _ in range(n)]
    return TokenStore.from_lists(src, [ids[::-1] for ids in src] if reverse else src)


def same_feed(one: Feed, other: Feed) -> bool:
    """Whether two feeds have the same tensors and the same position."""
    sides = [[tensor for b in feed.batches for tensor in (*b.inputs, b.targets)] for feed in (one, other)]
    positions = [(feed.indices.tolist(), feed.after, feed.epochs) for feed in (one, other)]
    return positions[0] == positions[1] and all(torch.equal(a, b) for a, b in zip(*sides, strict=True))


def assert_ranks_share_the_update(make: Callable[[], Any], n_ranks: int, *, n_sides: int = 1) -> int:
    """Check that several ranks together have the batches of one; returns the smallest number of batches of a rank."""
    feeders = [make() for _ in range(n_ranks + 1)]  # the first for a single process
    for rank, share in enumerate(feeders[1:]):
        share.rank, share.n_ranks = rank, n_ranks

    def rows_of(batches: list[Any]) -> list[list[int]]:
        """The tokens of each row; of pairs, those of both sides."""
        sides = [(b.inputs[0], b.targets) if b.targets.ndim == 2 else b.inputs[:1] for b in batches]
        rows = [row for batch in sides for row in zip(*batch, strict=True)]
        return sorted([i for side in row for i in side.tolist() if i] for row in rows)

    fewest = 99
    for one, *parts in islice(zip(*(feeder.feeds(DataPosition()) for feeder in feeders), strict=True), 20):
        batches = [batch for part in parts for batch in part.batches]
        n_slots = sum(tensor.numel() for batch in batches for tensor in batch.inputs[:n_sides])
        for part in parts:
            assert np.array_equal(part.indices, one.indices)
            assert (part.after, part.epochs, part.n_targets) == (one.after, one.epochs, one.n_targets)
            assert (part.n_tokens, part.n_slots) == (one.n_tokens, n_slots)
        assert sum(batch.n_targets for batch in batches) == one.n_targets
        assert rows_of(batches) == rows_of(one.batches)
        fewest = min(fewest, *(len(part.batches) for part in parts))
    return fewest


def settings(*, model: Mapping[str, Any] | None = None, **training: Any) -> Settings:
    """Resolved settings of a toy run. Of MODEL, sizes that the architecture does not have are left out."""
    sizes = {**MODEL, **(model or {})}
    fields = MODEL_SETTINGS[sizes.get("kind", "transformer")].model_fields
    own = {key: value for key, value in sizes.items() if key in fields or key not in MODEL}
    return Settings.from_mapping({"model": own, "training": {**TRAINING, **training}})


def examples(n: int, *, seed: int = 0) -> list[Example]:
    """Pairs of 1 to 9 random tokens of the oracle's vocabulary."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 10, size=(n, 2)).tolist()
    return [Example(*(draw.integers(FIRST, VOCAB, size=length).tolist() for length in pair)) for pair in lengths]


def updater(
    *,
    dropout: float = 0.0,
    precision: str = "float32",
    device: torch.device = CPU,
    criterion: Any = predict_tokens,
    **training: Any,
) -> Updater:
    """An update of a model that is small enough for the oracle; the same weights in every call."""
    torch.manual_seed(7)
    model = build_model(cases.settings(dropout=dropout, residual="pre"), n_src=VOCAB, n_tgt=VOCAB).to(device)
    chosen = TrainingSettings(**({"optimizer": "adam", "lr": 5e-3, "matrix_lr": 1e-2} | training))
    return Updater(model, chosen, device=device, precision=precision, criterion=criterion)


def weights_of(updater: Updater) -> torch.Tensor:
    """All weights of its model in one row."""
    return torch.cat([weight.detach().flatten() for weight in updater.model.parameters()])


def run(
    path: Path,
    asked: Settings,
    *,
    train_on: TokenStore,
    validate_on: TokenStore,
    judge: Judge | None = None,
    log: Log | None = None,
    vocab_size: int = 24,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[nn.Module, TrainingState]:
    """Train in `path`; the model with its last live weights, and the result."""
    torch.manual_seed(asked.training.seed)
    model = build_model(asked.model, n_src=vocab_size, n_tgt=vocab_size)
    with _folder(path, asked, ranks) as folder:
        asked = folder.settings
        ranks.bind_device(CPU)
        feeder = PairFeeder(train_on, asked.training, device=CPU)
        feeder.rank, feeder.n_ranks = ranks.rank, ranks.size
        held_out = PairFeeder(validate_on, asked.training, device=CPU)
        validator = Validator(model, held_out.batches, smoothing=asked.training.label_smoothing, judge=judge)
        precision = asked.training.precision
        criterion = find_task("translation").loss(asked)
        updater = Updater(model, asked.training, device=CPU, precision=precision, criterion=criterion, ranks=ranks)
        log = log or Log(quiet=True)
        result = Trainer(model, folder, updater=updater, feeder=feeder, validator=validator, log=log).run()
    return model, result


def change(path: Path, changes: Mapping[str, tuple[Any, Any]], *, continues: bool = False) -> None:
    """Record changed settings of the run in a folder."""
    asked = Manifest.read(path).asked_settings()
    with RunFolder.create(path, asked, "") as folder:
        folder.change(changes, continues=continues)


def judge(scores: Callable[[nn.Module], Mapping[str, float]]) -> Judge:
    """Scores a model itself."""
    return Judge(
        items=lambda: [0],
        outputs=lambda model, items: [scores(model) for _ in items],
        score=lambda found: found[0],
    )


def _folder(path: Path, asked: Settings, ranks: Ranks) -> RunFolder:
    """The run folder: the main process creates it, workers open it."""
    if ranks.is_main_process:
        folder = RunFolder.create(path, asked, "")
        if folder.requested:
            folder.change(folder.requested)
        ranks.start({"timeout": asked.training.timeout})
        return folder
    ranks.start({})
    return RunFolder.open(path, model=False)


def toy_run(path: Path, asked: Settings, *, ranks: Ranks = SINGLE_RANK) -> tuple[nn.Module, TrainingState]:
    """Learn to copy, on 320 pairs: several epochs in 60 updates."""
    return run(path, asked, train_on=pairs(320, seed=1), validate_on=pairs(40, seed=2), ranks=ranks)


KILLS: dict[str, tuple[type, str]] = {
    "update": (Updater, "update"),
    "line": (MetricsFile, "append"),
    "model": (RunFolder, "save_model"),
    "checkpoint": (Checkpoints, "save"),
    "prune": (Checkpoints, "prune"),
}


def kill_at(what: str, number: int) -> None:
    """From now on the `number`-th call of `what` kills this process."""
    owner, name = KILLS[what]
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def start_script(path: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Run a test file as a script, with as many threads as this process has: a CPU's sums depend on their number."""
    paths = Path(__file__).parent, Path(transduce.__file__).parents[1], os.environ.get("PYTHONPATH", "")
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen([sys.executable, path, *map(str, arguments)], env={**os.environ, **own})


def show_indices(patch: pytest.MonkeyPatch) -> None:
    """Name sentences by their indices: toy runs have no vocabulary."""
    patch.setattr(loop, "load_tokenizers", lambda folder: None)
    patch.setattr(PairFeeder, "texts", lambda self, index, tokenizers, epoch: [str(index)])


@contextlib.contextmanager
def failing_update(number: int, error: BaseException) -> Iterator[None]:
    """Raise the error in place of the `number`-th update of this process."""
    original, calls = Updater.update, [0]

    def update(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise error
        return original(*args, **options)

    with mock.patch.object(Updater, "update", update):
        yield


def poison(number: int, asked: Settings) -> None:
    """From now on, the loss of the `number`-th batch of a toy run is NaN, whenever it is used."""
    feeder, process = PairFeeder(pairs(320, seed=1), asked.training, device=CPU), this_process()
    feeder.rank, feeder.n_ranks = process.rank, process.size
    (bad,) = islice(feeder.feeds(DataPosition()), number - 1, number)
    assert bad.batches, "another process has all of it"
    show_indices(pytest.MonkeyPatch())

    def is_bad(batches: Any) -> bool:
        return batches and all(
            torch.equal(one.src, other.src) for one, other in zip(batches, bad.batches, strict=False)
        )

    Updater.update = with_nan(is_bad)  # type: ignore[method-assign]


def with_nan(is_bad: Callable[[Any], bool]) -> Any:
    """An `Updater.update` with NaN among the weights for some batches."""
    original = Updater.update

    def update(self: Updater, batches: Any, lr_scale: float, **options: Any) -> Any:
        if not is_bad(batches):
            return original(self, batches, lr_scale, **options)
        weight = next(self.model.parameters()).detach()
        before = weight.clone()
        weight.fill_(float("nan"))
        result = original(self, batches, lr_scale, **options)
        assert result.skipped and result.carry == ()
        weight.copy_(before)
        return result

    return update


def stall_validation(marker: Path) -> None:
    """From now on, validations create the file and then last a minute."""
    original = Validator.__call__

    def stalled(self: Validator, *ranks: Ranks) -> dict[str, float]:
        marker.touch()
        time.sleep(60)
        return original(self, *ranks)

    Validator.__call__ = stalled  # type: ignore[method-assign]


def note_samples(path: Path) -> None:
    """From now on, write the sentence indices of each update to a file, as lines of EPOCH INDEX NUMBER ..."""
    original = PairFeeder._feed

    def noted(self: PairFeeder, indices: np.ndarray, position: DataPosition, *, n_batches: int) -> Feed:
        feed = original(self, indices, position, n_batches=n_batches)
        if n_batches > 1:  # not those of validation
            with path.open("a") as file:
                print(position.epoch, position.index, *indices.tolist(), file=file)
        return feed

    PairFeeder._feed = noted  # type: ignore[method-assign]


def command(arguments: list[str], errors: Path, process: Mapping[str, str]) -> None:
    """Run a command as one of several processes, with stderr in the file `errors`."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= process
    torch.set_num_threads(1)
    main(arguments)


def process(arguments: list[str], errors: Path, process: Mapping[str, str] | None = None) -> None:
    """Train with FOLDER [--kill WHAT:N] [--poison N | --stall FILE] [key=value ...], then exit.

    `--stall`: validations create FILE and last a minute. `--kill`: send SIGKILL at the N-th call of WHAT, a name in
    KILLS. `--poison`: the loss of the N-th batch is NaN.
    Settings are those of `training`, and with a prefix `model.` those of the model. stderr goes to `errors`.
    `process`: the environment of one of several processes, which writes its samples to errors.samples.
    """
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    if process is not None:
        os.environ |= process
        note_samples(errors.with_suffix(".samples"))
    torch.set_num_threads(1)
    folder, *rest = arguments
    if rest[:1] == ["--kill"]:
        what, number = rest[1].split(":")
        kill_at(what, int(number))
        rest = rest[2:]
    if rest[:1] == ["--stall"]:
        stall_validation(Path(rest[1]))
        rest = rest[2:]
    number = int(rest[1]) if rest[:1] == ["--poison"] else 0
    values: dict[str, Any] = {}
    apply_overrides(values, rest[2 if number else 0 :])
    model = values.pop("model", {})
    if number:
        poison(number, settings(model=model, **values))
    try:
        with join_ranks() as ranks:
            toy_run(Path(folder), settings(model=model, **values), ranks=ranks)
    except (Interrupted, RankExited) as error:
        print(error, file=sys.stderr)
        assert_group_has_ended()
        sys.exit(error.exit_code)
    assert_group_has_ended()
    sys.exit(0)


def validate(arguments: list[str], errors: Path, process: Mapping[str, str]) -> None:
    """Validate initial weights with PREPARED_FOLDER PARALLEL [RANK], as one of several processes.

    Writes scores, all outputs and those of this process to errors.json. RANK runs out of memory when it computes some.
    """
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= process
    torch.set_num_threads(1)
    path, parallel, *failing = arguments
    folder = RunFolder.open(Path(path), model=False)
    task, settings, seen = find_task(folder.settings.task), folder.settings, dict[str, list[Any]]()
    try:
        with join_ranks() as ranks:
            ranks.start({"timeout": 1.0})
            prepared = open_prepared(task, folder)
            torch.manual_seed(1)
            n_src, n_tgt = prepared.tokenizers.n_src, prepared.tokenizers.n_tgt
            model = build_model(settings.model, n_src=n_src, n_tgt=n_tgt)
            ranks.distribute(model, CPU, parallel=parallel, precision="float32")
            validator = task.validate(model, prepared, settings, CPU)
            judge = validator.judge

            def outputs(model: nn.Module, items: Iterable[Any]) -> list[Any]:
                if failing == [str(ranks.rank)]:
                    raise MemoryError("out of memory")
                return seen.setdefault("own", judge.outputs(model, items))

            def score(found: list[Any]) -> Mapping[str, float]:
                return judge.score(seen.setdefault("all", found))

            validator.judge = replace(judge, outputs=outputs, score=score)
            seen["scores"] = [validator(ranks)]
            errors.with_suffix(".json").write_text(json.dumps(seen))
    except RankExited as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    assert_group_has_ended()


def assert_group_has_ended() -> None:
    """Threads of gloo that remain may abort the process while the interpreter exits."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if "gloo" in name], names


def killed_command(arguments: list[str], errors: Path, what: str, number: int) -> None:
    """Run a command that the `number`-th call of `what` kills."""
    kill_at(what, number)
    command(arguments, errors, {})
