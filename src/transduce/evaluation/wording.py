"""Phrases about models of each task, for reports, model cards and the commands suggested after a training."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from transduce.config.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Phrases about the models of a task. `of` fills the names in braces with facts about a model."""

    title: str  # noun phrase, in Markdown
    does: str  # verb phrase
    pipeline: str  # task on the Hugging Face Hub
    command: str  # shell line that uses the model in THIS_FOLDER
    more: tuple[str, ...] = ("transduce inspect THIS_FOLDER",)  # shell lines to continue with
    python: str = ""  # expression that uses the model in FOLDER
    samples: str = "Samples"  # heading of the report's samples
    shape: str  # line about the model, in plain text
    limits: tuple[str, ...] = ()  # sentences of the model card

    def of(self, settings: Settings) -> Wording:
        data, model, vectors = settings.data, settings.model, settings.model.reads_vectors
        labels = [f"`{' '.join(label.replace('`', ' ').split())}`" for label in data.labels or ()]
        memory = model.remembered
        facts = {
            "src": data.src_lang,
            "tgt": data.tgt_lang,
            "pairs": ", ".join(dict.fromkeys("-".join(direction) for direction in data.directions)),
            "labels": ", ".join(labels),
            "model": model.summary,
            "tokenizer": settings.tokenizer.kind,
            "context": data.context,
            "memory": " and nothing before them" if memory is None else f", and the last {memory:,} before them",
            "max_length": data.max_length,
            "output_length": settings.decoding.max_length,
            "text": "sequence of vectors" if vectors else "text",
            "input_text": "sequences of vectors" if vectors else "text",
            "tokens": "vectors" if vectors else "tokens",
            "input": "in.safetensors" if vectors else "< in.txt",
            "example": '"in.safetensors#0"' if vectors else '"..."',
        }
        names = ("title", "does", "command", "python", "shape")
        texts = {name: getattr(self, name).format(**facts) for name in names}
        more = () if vectors else tuple(line.format(**facts) for line in self.more)
        return replace(self, **texts, more=more, limits=tuple(limit.format(**facts) for limit in self.limits))

    def next_commands(self, folder: Path) -> list[str]:
        """Shell commands to suggest after training."""
        return [line.replace("THIS_FOLDER", shlex.quote(str(folder))) for line in (self.command, *self.more)]

    @property
    def usage(self) -> str:
        """A model's function and command, e.g. "translates text: `transduce translate`"."""
        return f"{self.does}: `{' '.join(self.command.split()[:2])}`"

    @property
    def imports(self) -> str:
        """The name that the Python example must import from transduce."""
        return self.python.partition(".")[0]


WORDINGS: dict[str, Wording] = {
    "translation": Wording(
        title="A translator from `{src}` to `{tgt}`",
        does="translates {input_text}",
        pipeline="translation",
        command="transduce translate THIS_FOLDER {input} > out.txt",
        more=(
            "transduce evaluate THIS_FOLDER --src test.{src} --ref test.{tgt}",
            "transduce inspect THIS_FOLDER",
            "transduce serve THIS_FOLDER",
        ),
        python="Translator.load(FOLDER).translate([{example}])[0].text",
        samples="Translations",
        shape="{src} to {tgt} · {model}",
        limits=(
            "It translates each {text} separately and does not see the others.",
            "It was trained on up to {max_length} {tokens} at once and writes up to {output_length} tokens.",
        ),
    ),
    "causal": Wording(
        title="A language model that continues text",
        does="continues text",
        pipeline="text-generation",
        command="transduce generate THIS_FOLDER < prompt.txt",
        more=("transduce inspect THIS_FOLDER", "transduce serve THIS_FOLDER"),
        python="Generator.load(FOLDER).generate([{example}])[0].text",
        samples="Texts",
        shape="language model, {tokenizer} tokens · {model}, context {context}",
        limits=("It sees {context} tokens at once{memory}.", "It writes likely text, which need not be true."),
    ),
    "masked": Wording(
        title="A masked language model",
        does="predicts masked tokens",
        pipeline="fill-mask",
        command='transduce fill THIS_FOLDER "The capital of France is <mask>."',
        python='MaskFiller.load(FOLDER).fill(["A <mask> runs."])[0].masks[0]',
        samples="Masked words",
        shape="masked language model · {model}",
        limits=("It sees {context} tokens at once.",),
    ),
    "classification": Wording(
        title="A classifier of {text}s with the labels {labels}",
        does="predicts labels",
        pipeline="text-classification",
        command="transduce classify THIS_FOLDER {input} > labels.txt",
        python="TextClassifier.load(FOLDER).classify([{example}])[0].label",
        samples="Predictions",
        shape="classifier of {text}s · {model}",
        limits=("It reads the first {max_length} {tokens} of a {text}.",),
    ),
    "encoding": Wording(
        title="An encoder of texts, without a head",
        does="can be fine-tuned",
        pipeline="feature-extraction",
        command="transduce train --from THIS_FOLDER ...",
        shape="text encoder · {model}",
    ),
}
"""Phrases by task. Imported encoders, from which other runs are fine-tuned, have the task `encoding`."""


def wording_of(settings: Settings, *, n_languages: int = 0) -> Wording:
    """Return the phrases for a run with these settings. `n_languages`: languages of an imported multilingual model."""
    wording, pairs = WORDINGS[settings.task], settings.data.directions
    if settings.data.languages != "none" and len(set(pairs)) > 1:
        codes = "--src-lang {src} --tgt-lang {tgt}"
        wording = replace(
            wording,
            title="A translator for `{pairs}`",
            command=f"transduce translate THIS_FOLDER {codes} {{input}} > out.txt",
            more=(
                f"transduce evaluate THIS_FOLDER {codes} --src test.{{src}} --ref test.{{tgt}}",
                f"transduce inspect THIS_FOLDER {codes}",
                "transduce serve THIS_FOLDER",
            ),
            python='Translator.load(FOLDER).between("{src}", "{tgt}").translate([{example}])[0].text',
            shape="{pairs} · {model}",
        )
        settings = settings.with_values("data", src_lang=pairs[0][0], tgt_lang=pairs[0][1])
    elif n_languages:
        command = "transduce translate THIS_FOLDER --src-lang en --tgt-lang de {input} > out.txt"
        wording = replace(wording, title=f"A translator between {n_languages} languages", command=command)
    return wording.of(settings)
