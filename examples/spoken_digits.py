"""Spoken digits by espeak-ng as files of vectors and text: `python examples/spoken_digits.py FOLDER` (docs/speech.md).

Each utterance is 3 to 5 digits. Its log-mel spectrogram has a frame of 40 numbers every 10 ms; 4 frames make a vector.
The voices of the test set are in no other set. With --wer REFERENCE HYPOTHESES it prints the word error rate instead.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ACCENTS = ("en-gb", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-029")
VOICES = {
    "train": ("m1", "m2", "m3", "m4", "m5", "m6", "f1", "f2", "f3", "f4"),
    "test": ("m7", "m8", "f5"),
}
RATE, WINDOW, HOP, N_MELS, STACK = 22_050, 551, 220, 40, 4


def speak(text: str, voice: str, *, speed: int, pitch: int) -> np.ndarray:
    """The samples of a text."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text]
    return np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout[44:], np.int16) / 32768


def mel_filters() -> np.ndarray:
    """Triangular filters [bins, N_MELS], equally spaced in mel = 2595 log10(1 + hertz / 700)."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, N_MELS + 2) / 2595) - 1)
    hertz = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    rising, falling = (hertz - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - hertz) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling))


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Normalized vectors [frames / STACK, STACK * N_MELS]."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP] * np.hanning(WINDOW)
    mel = np.log(np.abs(np.fft.rfft(frames)) ** 2 @ mel_filters() + 1e-6)
    mel = (mel - mel.mean(0)) / (mel.std(0) + 1e-3)
    return mel[: len(mel) // STACK * STACK].reshape(-1, STACK * N_MELS)


def write_set(folder: Path, name: str, n: int, voices: tuple[str, ...], seed: int) -> None:
    """`n` utterances as NAME.safetensors and NAME.txt."""
    draw, texts, vectors = random.Random(seed), list[str](), list[np.ndarray]()
    for _ in range(n):
        texts.append(" ".join(draw.choices(WORDS, k=draw.randint(3, 5))))
        voice = f"{draw.choice(ACCENTS)}+{draw.choice(voices)}"
        vectors.append(log_mel(speak(texts[-1], voice, speed=draw.randint(130, 200), pitch=draw.randint(30, 70))))
    lengths = np.array([len(one) for one in vectors])
    save_file(
        {"vectors": np.concatenate(vectors).astype(np.float32), "lengths": lengths}, folder / f"{name}.safetensors"
    )
    (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))
    print(
        f"{folder / name}: {n:,} utterances of {lengths.mean():.0f} vectors of {vectors[0].shape[1]} numbers on average"
    )


def word_errors(reference: list[str], hypothesis: list[str]) -> int:
    """The least number of insertions, deletions and substitutions (Levenshtein 1966)."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            last, row[j] = row[j], min(last + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def main(arguments: list[str]) -> None:
    if arguments[0] == "--wer":
        references, hypotheses = (Path(path).read_text().splitlines() for path in arguments[1:])
        pairs = [(ref.split(), hyp.split()) for ref, hyp in zip(references, hypotheses, strict=True)]
        n_words = sum(len(ref) for ref, _ in pairs)
        print(f"word error rate {sum(word_errors(*pair) for pair in pairs) / n_words:.2%} of {n_words:,} words")
        return
    folder, n = Path(arguments[0]), int(arguments[1]) if arguments[1:] else 2000
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, voices, seed in (
        ("train", n, "train", 1),
        ("valid", n // 20, "train", 2),
        ("test", n // 8, "test", 3),
    ):
        write_set(folder, name, size, VOICES[voices], seed)


if __name__ == "__main__":
    main(sys.argv[1:])
