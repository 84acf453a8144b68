"""What a model of each task is for, and how one has it do so: the PURPOSES table."""

from __future__ import annotations

from dataclasses import dataclass

from transduce.config import DataSettings


@dataclass(frozen=True, slots=True)
class Purpose:
    """One task's. `head`: what a model is, for its card, with places for what the data says; `command` is a shell line;
    `python` the class that does it, or nothing; `judged` the option of `transduce evaluate` that names what it is
    judged on, or nothing.
    """

    head: str
    does: str
    command: str
    python: str = ""
    judged: str = ""

    def head_of(self, data: DataSettings) -> str:
        """What a model of this data is."""
        labels = ", ".join(f"`{' '.join(label.replace('`', ' ').split())}`" for label in data.labels or ())
        return self.head.format(src=data.src_lang, tgt=data.tgt_lang, labels=labels)

    def told(self) -> str:
        """Half a sentence: what it does, and with what."""
        means = " ".join(self.command.split()[:2])
        return f"{self.does}, with `{means}`" + (f" or `{self.python}`" if self.python else "")


PURPOSES: dict[str, Purpose] = {
    "translation": Purpose(
        "A translator from `{src}` to `{tgt}`",
        "translates",
        "transduce translate THIS_FOLDER < in.txt > out.txt",
        "Translator",
        "--src",
    ),
    "causal": Purpose(
        "A language model that goes on with text",
        "goes on with text",
        'transduce generate THIS_FOLDER --prompt "..."',
        "Generator",
        "--text",
    ),
    "masked": Purpose(
        "A model that fills gaps in text",
        "fills gaps",
        'transduce fill THIS_FOLDER "The capital of France is <mask>."',
        "Filler",
        "--text",
    ),
    "classification": Purpose(
        "A classifier: {labels}",
        "tells labels",
        "transduce classify THIS_FOLDER < in.txt > labels.txt",
        "TextClassifier",
        "--labels",
    ),
    "encoding": Purpose(
        "An encoder: vectors of texts",
        "gives a training something to begin with",
        "transduce train --from THIS_FOLDER ...",
    ),
}
"""By task; "encoding" is that of an imported encoder without a head, which no training here is for."""
