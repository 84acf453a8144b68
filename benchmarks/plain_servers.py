"""Plain servers around CTranslate2, to compare `transduce serve` with: see serving.py. They need FastAPI and uvicorn.

    python benchmarks/plain_servers.py {threads,one} RUN FOLDER PORT

threads: what people write first, a function that FastAPI runs in its pool of threads, with a CTranslate2 translator of
one thread per core; each text is a batch. one: LibreTranslate's way, one text at a time, with one thread (two threads
of CTranslate2 wait for each other by spinning: 11 sentences/s instead of over 70). RUN gives the tokenizer, FOLDER the
model in CTranslate2's format. Requests and answers are those of /v1/translate, as far as serving.py needs them.
"""

import argparse
import threading
from contextlib import nullcontext
from pathlib import Path

import ctranslate2
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from transduce import Translator

CORES = 2
MAX_LENGTH = 127


class Body(BaseModel):
    """A request."""

    text: str


def make_app(kind: str, run: Path, folder: Path, precision: str) -> FastAPI:
    """The application."""
    offline = Translator.load(run)
    tokenizers, beam = offline.tokenizers, offline.settings.beam
    n_threads = CORES if kind == "threads" else 1
    engine = ctranslate2.Translator(str(folder), compute_type=precision, inter_threads=n_threads, intra_threads=1)
    places = {piece: i for i, piece in enumerate(tokenizers.tgt.pieces(range(tokenizers.n_tgt)))}
    turn = nullcontext() if kind == "threads" else threading.Lock()
    app = FastAPI()

    @app.post("/v1/translate")
    def translate(body: Body) -> dict[str, list[dict[str, str]]]:
        pieces = tokenizers.src.pieces(tokenizers.src.encode(body.text))
        with turn:
            (found,) = engine.translate_batch([pieces], beam_size=beam, max_decoding_length=MAX_LENGTH)
        text = tokenizers.tgt.decode([places[piece] for piece in found.hypotheses[0]])
        return {"translations": [{"text": text}]}

    return app


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["threads", "one"])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--precision", default="float32")
    args = parser.parse_args()
    app = make_app(args.kind, args.run, args.folder, args.precision)
    uvicorn.run(app, port=args.port, log_level="error")


if __name__ == "__main__":
    main()
