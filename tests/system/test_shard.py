"""Sharded models of several architectures learn what one process learns."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import pytest

from system.commands import assert_refused, sets, transduce
from system.teams import Team
from system.test_encoder import documents, sentiments
from system.test_ranks import assert_same_but_for_rounding
from transduce.demo.corpus import demo_pairs

pytestmark = pytest.mark.loopback  # processes that communicate

ASKED = (
    "model.d_model=32", "model.dropout=0.0", "training.optimizer=adam",
    "training.precision=float32", "training.max_updates=10", "training.valid_updates=5", "training.batch_tokens=200",
    "training.micro_batch_tokens=64", "training.lr=0.001",
)  # fmt: skip
TEXT = '[data]\ntrain = [{path = "text.txt"}]\nvalid = [{path = "valid.txt"}]\ncontext = 32\n'
LABELS = 'task = "classification"\n[data]\ntrain = [{path = "train.tsv"}]\nvalid = [{path = "valid.tsv"}]\n'
PAIRS = """[data]
train = [{path = "pairs.tsv"}]
valid = [{path = "pairs.tsv"}]
[decoding]
max_length = 20
"""
RECIPES = {
    "transformer": f'{PAIRS}[model]\ntie = "three_way"\nresidual = "pre"\n',
    "untied": f'{PAIRS}[model]\ntie = "none"\npositions = "rotary"\nn_kv_heads = 1\nn_heads = 2\n',
    "rnn": f'{PAIRS}[model]\nkind = "rnn"\n',
    "gpt": f'task = "causal"\n{TEXT}',
    "transformer-xl": f'task = "causal"\n{TEXT}[model]\nkind = "transformer-xl"\n',
    "bert": f'task = "masked"\n{TEXT}documents = "blank_line"\n[model]\nnext_sentence = true\n',
    "bert-classifier": LABELS,
}


@pytest.fixture(scope="module")
def team(processes: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Team:
    path = tmp_path_factory.mktemp("shard")
    pairs = [f"{pair.src}\t{pair.tgt}\n" for pair in demo_pairs("train", 60, seed=1)]
    texts = {"text.txt": documents(40, 1), "valid.txt": documents(5, 2), "pairs.tsv": "".join(pairs)}
    labels = {"train.tsv": sentiments(60, 1), "valid.tsv": sentiments(9, 2)}
    for name, text in {**texts, **labels, **{f"{name}.toml": recipe for name, recipe in RECIPES.items()}}.items():
        (path / name).write_text(text, encoding="utf-8")
    return Team(processes, path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_sharded_model_learns_what_one_process_learns(team: Team, name: str) -> None:
    """Updates have micro-batches of other numbers in each process, and the last one of an epoch is small."""
    recipe, one, two = (team.path / f"{name}{end}" for end in (".toml", "1", "2"))
    done = transduce("train", recipe, "--run", one, *sets(*ASKED))
    assert done.code == 0, done.err
    asked = ("train", recipe, "--run", two, *sets(*ASKED, "training.parallel=shard"))
    team.finish(team.command(name, 2, *asked), 0, 0)
    assert_same_but_for_rounding(one, two)


def test_muon_is_refused_and_not_chosen(team: Team) -> None:
    asked = ("train", team.path / "transformer.toml", "--dry-run", "--run", team.path / "muon")
    shard = "training.parallel=shard"
    refused = transduce(*asked, *sets(shard, "training.optimizer=muon"))
    assert_refused(refused, "training.optimizer = 'muon'", "training.parallel = 'shard'", "adamw")
    assert "adamw" in transduce(*asked, *sets(shard, "model.d_model=32")).err
