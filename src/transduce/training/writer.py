"""Writing checkpoints in another thread, while training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

from transduce.errors import RankExited
from transduce.training.ranks import Ranks


@final
class CheckpointWriter:
    """Writes one checkpoint at a time, in steps. Leaving the context waits for a step that has begun.

    A step begins after all ranks have done the one before. The main threads learn it from the agreement after each
    update, which also notices lost and stuck ranks; the writing threads exchange nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._step: Future[None] | None = None
        self._steps: list[Callable[[], None]] = []  # that have not begun; all ranks have the same number

    def start(self, *steps: Callable[[], None]) -> None:
        """Begin a checkpoint, after the last one is complete. All ranks call this, with equally many steps."""
        self._step, self._steps = self._pool.submit(steps[0]), [*steps[1:]]

    def agree(self, signal: int, seconds: float) -> tuple[int, float]:
        """`Ranks.agree`, and the next step if it is time. Raises the error of a step that has failed."""
        is_writing = self._step is not None and not self._step.done()
        if self._step is not None and not is_writing:
            self._step.result()
        signal, seconds, are_writing = self.ranks.agree(signal, seconds, is_writing=is_writing)
        if self._steps and not are_writing:
            self._step = self._pool.submit(self._steps.pop(0))
        return signal, seconds

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All ranks call this. Raises the error of a step that has failed.

        No rank continues before all are done: torchrun ends those that remain when one exits.
        """
        while self._step is not None:
            wait([self._step])
            is_last = not self._steps
            self.agree(0, 0.0)
            if is_last:
                self._step = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._pool.shutdown()
        if self._step is not None and not isinstance(error, RankExited):
            self._step.result()  # instead of an error that says that everything is saved
