"""Scores, tests and bins from statistics of outputs, compared with sacreBLEU on the text itself."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from transduce.comparison.measures import RunMeasures, Speeds
from transduce.comparison.result import RecipeComparison, scores_by_length, system_of
from transduce.evaluation.significance import MEASURES, Outputs, paired_bootstrap, ratio_of

BLEU_SCORE = MEASURES["BLEU"].score
TEXT = "Ein kleiner Hund läuft über die grüne Wiese , und zwei Kinder schauen ihm zu ."
WORDS = TEXT.split()


def corpus(n: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(n)]


def worse(lines: list[str], rate: float, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) if draw.random() < rate else w for w in line.split()) for line in lines]


def statistics_of(hypotheses: list[str], references: list[str]) -> np.ndarray:
    return np.array(BLEU()._extract_corpus_statistics(hypotheses, [references]), dtype=np.float64)


def run(lines: list[str], references: list[str], **values: object) -> RunMeasures:
    lengths = np.array([len(line.split()) for line in references])
    given = {
        "n_parameters": 100, "updates": 10, "seconds": 60.0, "tokens_per_second": 5.0, "memory": None, "nll": 2.0,
        "curves": {}, "sets": (Outputs("test", "BLEU", statistics_of(lines, references), lengths),),
    }  # fmt: skip
    return RunMeasures(**{**given, **values})  # type: ignore[arg-type]


def test_the_test_of_several_seeds_compares_their_means() -> None:
    references = corpus(60)
    sides = [[worse(references, rate, seed) for seed in range(3)] for rate in (0.2, 0.4)]
    found = paired_bootstrap(
        *([statistics_of(one, references) for one in side] for side in sides), MEASURES["BLEU"].score
    )
    means = [statistics.fmean(BLEU().corpus_score(one, [references]).score for one in side) for side in sides]
    assert found.difference == pytest.approx(means[0] - means[1])
    assert found.interval[0] < found.difference < found.interval[1] and found.verdict == "better"
    both = [statistics_of(one, references) for one in sides[0]]
    same = paired_bootstrap(both, both, BLEU_SCORE)
    assert (same.difference, same.p_value) == (0, 1)


def test_lower_is_better_where_the_measure_says_so() -> None:
    draw = np.random.default_rng(1)
    low, high = (np.stack([draw.uniform(a, a + 1, 50), np.ones(50)], 1) for a in (0, 1))
    found = paired_bootstrap([low], [high], ratio_of, higher_is_better=False)
    assert found.verdict == "better" and found.difference < 0
    assert paired_bootstrap([low[:1]], [high[:1]], ratio_of).p_value == 1


def test_bins_of_length_cover_every_sentence_once() -> None:
    references = corpus(200)
    lines = worse(references, 0.3, 1)
    found = scores_by_length([run(lines, references)])
    lengths = np.array([len(line.split()) for line in references])
    assert 3 <= len(found) <= 6 and [x for x, _ in found] == sorted(x for x, _ in found)
    shortest = next(n for n in range(4, 15) if np.sum(lengths <= n) >= 200 // 6)  # 6 groups at most
    first = [i for i, length in enumerate(lengths) if length <= shortest]
    expected = BLEU().corpus_score([lines[i] for i in first], [[references[i] for i in first]]).score
    assert found[0][1] == pytest.approx(expected)
    assert scores_by_length([run(lines[:30], references[:30])]) == []


def test_the_table_has_a_row_per_recipe_with_means_over_seeds() -> None:
    references = corpus(100)
    runs = {
        name: {Path(name, str(seed)): run(worse(references, rate, seed), references, nll=rate) for seed in (1, 2)}
        for name, rate in (("a", 0.4), ("b", 0.1))
    }
    first = list(runs["a"].values())
    systems = [system_of(name, "transformer", runs[name], first) for name in ("a", "b")]
    found = RecipeComparison(
        measure="BLEU", signature="s", systems=systems, conditions=["same"], settings={}, failed={},
        speeds=Speeds({}, "sentences", "PyTorch", {"a": 9.0, "b": 3.0}),
    )  # fmt: skip
    header, (one, two) = found.table()
    values = [one.sets[0].value for one in runs["b"].values()]
    assert two[header.index("BLEU test")] == f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert one[header.index("against the first")] == "" and two[header.index("against the first")].endswith("*")
    assert systems[1].differences["test"].verdict == "better"  # type: ignore[union-attr]
    assert found.to_json()["systems"][1]["scores"]["test"] == values


def test_outputs_survive_json() -> None:
    references = corpus(5)
    one = run(references, references).sets[0]
    found = Outputs.from_json(one.to_json())
    assert found.value == one.value == pytest.approx(100) and (found.lengths == one.lengths).all()
    for key, value in (("measure", "x"), ("statistics", [1, 2]), ("lengths", [1])):
        with pytest.raises(ValueError, match="statistics"):
            Outputs.from_json({**one.to_json(), key: value})
