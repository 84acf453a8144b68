"""Scores and tests from statistics of outputs, compared with sacreBLEU on the text itself."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from transduce.comparison.compare import RecipeComparison, RunMeasures, system_of
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
    given = {
        "n_parameters": 100, "updates": 10, "seconds": 60.0, "tokens_per_second": 5.0, "memory": None, "nll": 2.0,
        "sets": (Outputs("test", "BLEU", statistics_of(lines, references)),),
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


def test_the_table_has_a_row_per_recipe_with_means_over_seeds() -> None:
    references = corpus(100)
    runs = {
        name: {Path(name, str(seed)): run(worse(references, rate, seed), references, nll=rate) for seed in (1, 2)}
        for name, rate in (("a", 0.4), ("b", 0.1))
    }
    first = list(runs["a"].values())
    systems = [system_of(name, runs[name], first) for name in ("a", "b")]
    found = RecipeComparison(
        measure="BLEU", signature="s", systems=systems, conditions="same", failed={},
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
    assert found.value == one.value == pytest.approx(100) and found.signature == one.signature
    for key, value in (("measure", "x"), ("statistics", [1, 2])):
        with pytest.raises(ValueError, match="statistics"):
            Outputs.from_json({**one.to_json(), key: value})
