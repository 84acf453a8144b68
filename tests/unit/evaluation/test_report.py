"""The report and the card show the content of the run's files, as text, and load nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from transduce.config.settings import Settings
from transduce.data.clean import CleanReport
from transduce.data.leaks import LeakCheck, watch
from transduce.data.pairs import Pair
from transduce.evaluation.html import environment
from transduce.evaluation.metrics import TranslationScores, evaluate
from transduce.evaluation.report import card, marked, plain, report_html, set_table, write_card, write_report
from transduce.evaluation.run_record import (
    RunRecord,
    read_record,
    save_set,
)
from transduce.evaluation.wording import wording_of
from transduce.inspection.recorded_modules import pack, unpack
from transduce.metrics_log import MetricsFile
from transduce.runs.atomic import write_json
from transduce.runs.folder import RunFolder

HOSTILE = (
    "</script><script>alert(1)</script><img src=https://evil.example/x onerror=alert(1)> & \"'`| **b** [l](http://e)"
)
REFERENCES = ["ein Hund läuft", "zwei Katzen schlafen hier", "das Haus ist alt"]
HYPOTHESES = ["ein Hund läuft", "zwei Katzen schlafen dort", "ein Haus ist alt"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    settings = Settings.from_mapping({"name": "a run", "data": {"src_lang": "en", "tgt_lang": "de"}})
    run = RunFolder.create(tmp_path / "run", settings, f"# {HOSTILE}\n")
    run.close()
    return run


def save_scores(run: RunFolder, name: str, scores: TranslationScores, search: dict[str, int] | None = None) -> None:
    save_set(run, "scores", name, {"scores": scores.to_json(), "search": search or {}})


def fill(run: RunFolder, text: str = "") -> None:
    """Fill a run folder, with `text` wherever text can come from outside."""
    run.save_model({"w": torch.zeros(10, 7)})
    metrics = MetricsFile(run.path / "metrics.jsonl")
    metrics.append({"event": "start", "update": 0, "seconds": 0.0, "torch": "9.9" + text})
    for update in range(10, 101, 10):
        loss = 9.0 / update if update != 50 else float("nan")
        row = {"loss": loss, "lr": 0.001, "tokens_per_second": 100.0, "grad_norm": 1.0}
        metrics.append({"event": "update", "update": update, "seconds": update * 1.0, "padding": 0.0312, **row})
    metrics.append(
        {"event": "validation", "update": 50, "seconds": 50.0, "loss": 3.25, "perplexity": 4.5, "bleu": 21.5}
    )
    metrics.append({"event": "restart", "update": 50, "seconds": 50.0})
    metrics.append({"event": "skipped", "update": 70, "loss": None, "grad_norm": None})
    metrics.append({"event": "memory", "update": 81, "too_large": 4096})
    metrics.append({"event": "end", "update": 100, "seconds": 100.0, "reason": "max_updates" + text})
    save_scores(run, "valid" + text, evaluate(HYPOTHESES, REFERENCES), search={"beam": 5})
    save_scores(run, "test", evaluate(REFERENCES, REFERENCES, tokenize="none"))
    sample = {"src": "a dog" + text, "ref": "ein Hund" + text, "hyp": "eine Katze" + text}
    save_set(run, "samples", "valid" + text, {"update": 90, "samples": [sample] * 14})
    sides = {name: {"text": shown + text} for name, shown in (("src", "look here"), ("tgt_out", "sieh her"))}
    layer = {"kind": "cross", "layer": 0, "weights": pack(np.full((2, 2, 2), 0.5)), "labels": ["mixed" + text] * 2}
    run.write_record("attention.json", {"sentences": [{"sides": sides, "attention": [layer], "rules": {}}]})
    cleaner = CleanReport(read=30)
    held = Pair("source" + text, "target" + text, "train.en" + text, 7)
    for _ in range(3):
        cleaner.dropped["empty" + text].add(held)
    cleaning = cleaner.to_json() | {"changed": [{"reason": "controls" + text, "count": 1, "samples": []}]}
    train = {"name": "train" + text, "files": ["train.en" + text], "pairs": 27, "cleaning": cleaning}
    other = Pair(held.src, "something else", "train.en", 8)
    check = LeakCheck("test" + text, [(p.src, p.tgt) for p in (held, held, other, *many())])
    for _ in watch([held, other], lambda p: (p.src, p.tgt), [check], lambda p: p.where):
        pass
    leaks = [check.to_json()]
    data = {"fingerprint": "abc123", "sets": [train], "leaks": leaks}
    write_json(run.path / "data.json", data)


def many() -> list[Pair]:
    return [Pair(f"only held out {i}", "nur hier", "test.en", i) for i in range(6)]


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data + " "


def test_the_report_shows_the_content_of_the_files(run: RunFolder) -> None:
    fill(run)
    write_report(run)
    page = Elements((run.path / "report.html").read_text(encoding="utf-8"))
    assert page.open == [], "every element is closed"
    text = " ".join(page.text.split())
    scores = evaluate(HYPOTHESES, REFERENCES)
    for expected in (
        "a run",
        "en to de",
        f"{scores.bleu.value:.2f}",
        scores.bleu.signature,
        scores.ter.signature,
        "tok:none",
        "beam 5",
        "look here",
        "empty: 3",
        "train.en:7",
        "controls: 1",
        "3 of 9 pairs overlap with the training text",
        "3.1% of the tokens",
        "abc123",
        "Ended by max_updates after 100 updates",
        "1: after update 50",
        "restart 50 interrupted: resumed from the checkpoint 0:50",
        "skipped 70 the loss or its gradient was not finite; the weights did not change",
        "out of memory 81 batches of 4,096 slots or more are split in two",
        "9.9",
        "2 more",
    ):
        assert expected in text, expected
    for key in Settings().model_dump()["training"]:
        assert key in text, f"the setting {key} is not shown"
    charts = [a["aria-label"] for tag, a in page.elements if tag == "svg" and "aria-label" in a]
    assert len(charts) == 5  # loss, scores, learning rate, speed, gradient


def test_the_worst_translations_and_the_problems_come_first(run: RunFolder) -> None:
    fill(run)
    right, wrong = ({"src": "", "ref": "ein Hund bellt", "hyp": text} for text in ("ein Hund bellt", "gar nichts"))
    save_set(run, "samples", "test", {"update": 90, "samples": [right], "worst": [wrong]})
    text = " ".join(Elements(report_html(read_record(run))).text.split())
    *_, shown = text.partition("test, update 90")
    assert (
        shown.index("gar nichts") < shown.index("The first 1 of the set, not selected") < shown.rindex("ein Hund bellt")
    )
    assert text.index("3 of 9 pairs overlap") < text.index("skipped updates: 1") < text.index("precisions")


def test_a_report_with_hostile_text_loads_and_runs_nothing(run: RunFolder) -> None:
    fill(run, HOSTILE)
    page = Elements(report_html(read_record(run)))
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "link", "iframe", "object", "embed", "form", "base", "video", "audio"}
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "data", "action", "onerror", "onload"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in str(policy[0])
    scripts = [a for tag, a in page.elements if tag == "script"]
    assert [a for a in scripts if a.get("type") != "application/json"] == [{}, {"type": "module"}], "two scripts, ours"
    assert page.text.count("alert(1)") > 20, "hostile text is shown as text"


def test_embedded_data_are_json(run: RunFolder) -> None:
    fill(run, HOSTILE)
    found = re.findall(
        r'<script type="application/json" (?:class|id)="\w+">(.*?)</script>', report_html(read_record(run))
    )
    assert len(found) == 5 + 1
    for text in found:
        json.loads(text)


def test_an_empty_run_has_a_report_and_a_card(run: RunFolder) -> None:
    write_report(run)
    write_card(run)
    page = Elements((run.path / "report.html").read_text(encoding="utf-8"))
    assert page.open == [] and "Settings" in page.text and "Translations" not in page.text
    assert "## Use" in (run.path / "README.md").read_text(encoding="utf-8")


def test_only_sets_that_are_cleaned_have_a_number_of_dropped_pairs() -> None:
    text = {"name": "train", "files": ["a.txt"], "documents": 2, "bytes": 1500, "tokens": 400}
    plain_text = set_table([text])
    assert plain_text is not None and plain_text.header == ("set", "documents", "bytes", "tokens", "files")
    cleaned = {"name": "train", "pairs": 27, "cleaning": {"read": 30, "kept": 27}}
    pairs = set_table([cleaned, {"name": "test", "pairs": 9}])
    assert pairs is not None and pairs.header == ("set", "pairs", "dropped", "files")
    assert pairs.rows == [["train", "27", "3", ""], ["test", "9", "", ""]]


@pytest.mark.parametrize(("source", "expected"), [("tokens", "text"), ("vectors", "sequences of vectors")])
def test_a_translator_says_what_it_translates(source: str, expected: str) -> None:
    settings = Settings.from_mapping({"model": {"source": source}})
    assert wording_of(settings).usage == f"translates {expected}: `transduce translate`"


def test_a_finished_run_without_scores_says_so(run: RunFolder) -> None:
    MetricsFile(run.path / "metrics.jsonl").append({"event": "end", "update": 4, "seconds": 1.0})
    record = read_record(run)
    for text in (card(record), Elements(report_html(record)).text):
        assert "Nothing was scored" in text


def test_scores_of_one_set_are_replaced_not_repeated(run: RunFolder) -> None:
    save_scores(run, "test", evaluate(HYPOTHESES, REFERENCES))
    save_scores(run, "valid", evaluate(HYPOTHESES, REFERENCES))
    save_scores(run, "test", evaluate(REFERENCES, REFERENCES))
    found = {s.name: s.scores for s in read_record(run).scores}
    assert found == {"valid": evaluate(HYPOTHESES, REFERENCES), "test": evaluate(REFERENCES, REFERENCES)}


def test_records_survive_a_round_trip(run: RunFolder) -> None:
    fill(run)
    record = read_record(run)
    assert record.n_parameters == 70
    assert record.samples[0]["samples"][0] == {"src": "a dog", "ref": "ein Hund", "hyp": "eine Katze"}
    (sentence,) = record.attention
    np.testing.assert_array_equal(unpack(sentence["attention"][0]["weights"]), 0.5)
    assert record.versions["torch"] == "9.9" and record.versions["transduce"]
    assert record.points("update", "loss")[:2] == [(10.0, 0.9), (20.0, 0.45)]
    assert len(record.points("update", "loss")) == 9, "a loss that was not finite is no point"


def test_differences_are_marked() -> None:
    ref, hyp = marked("ein alter Hund läuft", "ein Hund läuft weg <b>")
    assert ref == "ein <ins>alter</ins> Hund läuft"
    assert hyp == "ein Hund läuft <del>weg &lt;b&gt;</del>"
    assert marked("gleich", "gleich") == ("gleich", "gleich")
    assert marked("", "da") == ("", "<del>da</del>")


# --- the card


def test_the_card_shows_scores_data_and_use(run: RunFolder) -> None:
    fill(run)
    write_card(run)
    text = (run.path / "README.md").read_text(encoding="utf-8")
    scores = evaluate(HYPOTHESES, REFERENCES)
    for expected in (
        "# a run",
        "`en` to `de`",
        f"{scores.bleu.value:.2f}",
        f"`BLEU {scores.bleu.signature}`",
        "abc123",
        "| 27 |",
        "transduce translate",
        "Translator.load",
        "## Limits",
        "torch 9.9",
        "70 parameters",
        "restarts: 1",
        "test: 3 of 9 pairs overlap with the training text",
        "train.en",
    ):
        assert expected in text, expected
    assert str(run.path.parent) not in text, "a card is shared: no path of the machine"


def test_the_card_escapes_hostile_text(run: RunFolder) -> None:
    fill(run, HOSTILE)
    text = card(read_record(run))
    without_escapes = re.sub(r"\\.", "", text)
    assert not re.findall(r"<(?!!--)", without_escapes.replace("translate THIS_FOLDER < in.txt", ""))
    assert "**b**" not in text
    links = re.findall(r"\]\(([^)]*)\)", without_escapes)
    assert set(links) <= {"report.html", "config.json", "recipe.toml"}
    rows = [line for line in re.sub(r"\\\|", "", text).split("\n") if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {4, 5, 9}, "no cell of a table breaks it"


def test_a_card_leaves_the_shared_template_environment_as_it_is(run: RunFolder) -> None:
    card(read_record(run))
    assert "code" not in environment(autoescape=False).filters


def test_plain_text_is_one_line() -> None:
    assert plain("a\n# b\t`c`") == r"a # b \`c\`"


def test_a_record_needs_nothing_but_settings() -> None:
    record = RunRecord("x", Settings())
    assert "<h1>x</h1>" in report_html(record)
    assert card(record).startswith("# x\n")
