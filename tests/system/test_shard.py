"""Several processes learn and score with models of several architectures what one process does."""

import json
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

import toys
from system.commands import assert_refused, sets, succeed, transduce
from system.teams import LEFT, Team, free_port
from system.test_encoder import documents, sentiments
from system.test_ranks import assert_same_but_for_rounding
from transduce.demo.corpus import demo_pairs

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("unchecked")]  # processes that communicate

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
ENCODER, DECODER = "n_encoder_layers = 2\n", "n_decoder_layers = 2\n"
RECIPES = {
    "transformer": f'{PAIRS}[model]\n{ENCODER}{DECODER}tie = "three_way"\nresidual = "pre"\n',
    "untied": f'{PAIRS}[model]\n{ENCODER}{DECODER}tie = "none"\npositions = "rotary"\nn_kv_heads = 1\nn_heads = 2\n',
    "rnn": f'{PAIRS}[model]\nkind = "rnn"\n',
    "gpt": f'task = "causal"\n{TEXT}[model]\n{DECODER}',
    "transformer-xl": f'task = "causal"\n{TEXT}[model]\n{DECODER}kind = "transformer-xl"\n',
    "bert": f'task = "masked"\n{TEXT}documents = "blank_line"\n[model]\n{ENCODER}next_sentence = true\n',
    "bert-classifier": f"{LABELS}[model]\n{ENCODER}",
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


@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "transformer")]
)
def test_a_sharded_model_learns_what_one_process_learns(team: Team, name: str) -> None:
    """Updates have micro-batches of other numbers in each process, and the last one of an epoch is small."""
    recipe, one, two = (team.path / f"{name}{end}" for end in (".toml", "1", "2"))
    succeed("train", recipe, "--run", one, *sets(*ASKED))
    asked = ("train", recipe, "--run", two, *sets(*ASKED, "training.parallel=shard"))
    team.finish(team.command(name, 2, *asked), 0, 0)
    assert_same_but_for_rounding(one, two)


def test_muon_is_refused_and_not_chosen(team: Team) -> None:
    asked = ("train", team.path / "transformer.toml", "--dry-run", "--run", team.path / "muon")
    shard = "training.parallel=shard"
    refused = transduce(*asked, *sets(shard, "training.optimizer=muon"))
    assert_refused(refused, "training.optimizer = 'muon'", "training.parallel = 'shard'", "adamw")
    assert "adamw" in transduce(*asked, *sets(shard, "model.d_model=32")).err


def validate(team: Team, name: str, n: int, *asked: str, codes: Sequence[int] = (0,)) -> list[dict[str, Any]]:
    """Validate the initial weights of a recipe's model; returns the results of each process, if there are any."""
    folder = team.path / f"{name}-prepared"
    if not folder.exists():
        succeed("prepare", team.path / f"{name}.toml", "--run", folder, *sets(*ASKED))
    team.port = free_port()
    files = [team.path / f"{name}.{rank}.err" for rank in range(n)]
    given = [([str(folder), *asked], file, team.process(rank, n)) for rank, file in enumerate(files)]
    members = [team.context.Process(target=toys.validate, args=one) for one in given]
    for member in members:
        member.start()
    team.finish(members, *(codes * n)[:n])
    results = [file.with_suffix(".json") for file in files]
    return [json.loads(path.read_text()) for path in results if path.exists()]


@pytest.mark.parametrize("name", ["transformer", "bert", "bert-classifier"])
def test_processes_divide_the_outputs_that_a_validation_scores(team: Team, name: str) -> None:
    (one,) = validate(team, name, 1, "replicate")
    assert one["own"] == one["all"] and len(set(map(str, one["all"]))) > 1
    (scores,) = one["scores"]
    for n, parallel in ((2, "replicate"), (3, "replicate"), (2, "shard")):
        several = validate(team, name, n, parallel)
        for other in several:
            assert other["scores"] == [pytest.approx(scores, rel=1e-6)]
            judged = scores.keys() - {"loss", "nll", "perplexity"}
            assert judged and [other["scores"][0][key] for key in judged] == [scores[key] for key in judged]
        assert several[0]["all"] == one["all"]
        assert not any("all" in other for other in several[1:]), "the main process scores"
        divided = [one["all"][rank::n] for rank in range(n)]
        assert [other.get("own") for other in several] == (divided if parallel == "replicate" else [one["all"], None])


def test_a_process_that_fails_to_translate_ends_the_others(team: Team) -> None:
    assert validate(team, "untied", 2, "replicate", "1", codes=(LEFT, 1)) == []
    assert "out of memory" in team.said("untied", 1)
    assert "another process of this training exited" in team.said("untied", 0)
