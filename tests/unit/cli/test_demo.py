"""`transduce demo` trains for a number of updates, not for a time, and leaves nothing to the speed of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from transduce.__main__ import main
from transduce.config.settings import Settings
from transduce.errors import UserError


@pytest.mark.parametrize("options, updates", [([], 2000), (["--updates", "70"], 70)])
def test_demo_stops_after_a_number_of_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], updates: int
) -> None:
    seen: list[Settings] = []

    def train(settings: Settings, *_: object, **__: object) -> None:
        seen.append(settings)
        raise UserError("far enough")

    monkeypatch.setattr("transduce.pipeline.train", train)
    with pytest.raises(SystemExit):
        main(["demo", "--run", str(tmp_path / "demo"), *options])
    training = seen[0].training
    assert (training.max_updates, training.max_minutes, training.max_epochs) == (updates, None, None)
    assert (training.precision, training.optimizer, training.micro_batch_tokens) == ("auto", "muon", 2048)
