"""Share of sentences whose words in unseen characters come back unchanged.

    python benchmarks/copies.py RUN --src test.en --sentences 400

In each sentence one or two words are replaced by words in other scripts, or by emoji, that the training text of the run
must lack. A sentence counts if each of these words occurs in the translation as often as in the source.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

from transduce.decoding.translator import Translator

WORDS = [
    "Þórr", "Łódź", "Иванов", "Щукин", "Παπαδόπουλος", "Γιώργος", "ישראל", "שלום", "محمد", "مدرسة", "राम", "नमस्ते",
    "தமிழ்", "ไทย", "한국", "서울", "Աննա", "თბილისი", "😀", "🚀", "👩\u200d💻",
]  # fmt: skip


def with_unseen_words(sentence: str, draw: random.Random) -> tuple[str, list[str]]:
    """The sentence with one or two of its words replaced, and the new words."""
    words = sentence.split()
    unseen = draw.sample(WORDS, draw.choice([1, 2]))
    for place, word in zip(draw.sample(range(len(words)), len(unseen)), unseen, strict=True):
        words[place] = re.sub(r"\w(?:.*\w)?", lambda _, word=word: word, words[place], count=1)
    text = " ".join(words)
    return text, [word for word in unseen if word in text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--src", type=Path, required=True, help="source sentences, one per line")
    parser.add_argument("--sentences", type=int, default=400)
    asked = parser.parse_args()
    lines = [line for line in asked.src.read_text(encoding="utf-8").splitlines() if len(line.split()) > 3]
    draw = random.Random(1)
    examples = [with_unseen_words(line, draw) for line in draw.choices(lines, k=asked.sentences)]
    translations = Translator.load(asked.run, device="cpu").translate([text for text, _ in examples])
    lost = [
        (text, translation.text)
        for (text, words), translation in zip(examples, translations, strict=True)
        if any(translation.text.count(word) != text.count(word) for word in words)
    ]
    n_cut = sum(not translation.finished for translation in translations)
    print(f"unchanged in {len(examples) - len(lost)} of {len(examples)} sentences; {n_cut} outputs were cut off")
    for text, translation in lost[:5]:
        print(f"  {text} | {translation}")


if __name__ == "__main__":
    main()
