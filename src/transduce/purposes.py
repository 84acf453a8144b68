"""What a model of each task is for, and how one has it do so: the PURPOSES table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Purpose:
    """One task's. `command` is a shell line; `python` the class that does it, or nothing."""

    does: str
    command: str
    python: str = ""

    def told(self) -> str:
        """Half a sentence: what it does, and with what."""
        means = " ".join(self.command.split()[:2])
        return f"{self.does}, with `{means}`" + (f" or `{self.python}`" if self.python else "")


PURPOSES: dict[str, Purpose] = {
    "translation": Purpose("translates", "transduce translate THIS_FOLDER < in.txt > out.txt", "Translator"),
    "causal": Purpose("goes on with text", 'transduce generate THIS_FOLDER --prompt "..."', "Generator"),
    "masked": Purpose("fills gaps", 'transduce fill THIS_FOLDER "The capital of France is <mask>."', "Filler"),
    "classification": Purpose("tells labels", "transduce classify THIS_FOLDER < in.txt > labels.txt", "TextClassifier"),
    "encoding": Purpose("gives a training something to begin with", "transduce train --from THIS_FOLDER ..."),
}
"""By task; "encoding" is that of an imported encoder without a head, which no training here is for."""
