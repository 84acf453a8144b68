"""An untrained translator in a run folder, with a real vocabulary."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oracle.stand_in import untrained
from transduce.config.settings import Settings
from transduce.decoding.translator import Translator
from transduce.demo.corpus import demo_pairs
from transduce.runs.folder import RunFolder
from transduce.text.training import train_tokenizers

SIZES = {"d_model": 32, "d_ff": 48, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2}


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [pair.src for pair in demo_pairs("train", 120, seed=3)]


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Callable[..., Path]:
    tgts = [pair.tgt for pair in demo_pairs("train", 120, seed=3)]

    def make(**model: object) -> Path:
        values = {"model": SIZES | model, "data": {"max_length": 60}, "decoding": {"max_length": 40}}
        settings = Settings.from_mapping(values)
        tokenizers = train_tokenizers(texts, tgts, settings.tokenizer, vocab_size=300)
        path = tmp_path_factory.mktemp("translator") / "run"
        with RunFolder.create(path, settings, "") as run:
            run.save_tokenizers(tokenizers.save)
            run.write_settings(settings)
            made = untrained(settings, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt)
            run.save_model(dict(made.state_dict()))
        return path

    return make


@pytest.fixture(scope="session")
def run(make_run: Callable[..., Path]) -> Path:
    return make_run()


@pytest.fixture(scope="session")
def translator(run: Path) -> Translator:
    return Translator.load(run, device="cpu")
