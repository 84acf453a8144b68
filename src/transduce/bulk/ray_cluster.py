"""Bulk translation, and the preparation of text, on the nodes of a Ray cluster.

This process reads and writes the files and sends chunks to actors, each with its own model or vocabulary. If a node
fails, the others compute its chunks. A chunk is written once, when its result is here: no line is lost or doubled.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import transduce
from transduce.bulk.chunks import Chunk, Translated
from transduce.data.spool import Arrays
from transduce.data.workers import ChunkT
from transduce.errors import SettingsError, TransduceError
from transduce.logging import Log
from transduce.process import collect_garbage_rarely

T = TypeVar("T")

_CHUNKS_PER_ACTOR = 4  # sent and not written: the next ones are there when one is done, and slow ones delay nobody
_SECONDS_TO_START = 20.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The nodes of a Ray cluster, for `translate_to_folder`.

    Every node with CPUs runs an actor with all its cores; one with several GPUs an actor for each. transduce must be
    installed there, and the run folder must have the same path; the files are needed here only. To prepare text every
    core has an actor, and only files of vectors are needed there.

    Args:
        address: HOST:PORT of the cluster's head, of which this machine is a node, or "auto".
    """

    address: str = "auto"

    def workers(self, log: Log) -> RayWorkers:
        """Workers that prepare text on the cluster, for `transduce.pipeline.prepare`."""
        return RayWorkers(self, log)

    @contextlib.contextmanager
    def start(self, make: Callable[[], Any], log: Log, *, gpus: bool, per_core: bool = False) -> Iterator[RayNodes]:
        """Make the same object in actors on all nodes. It has `how`, `notes`, and is called with chunks.

        Raises `SettingsError` if there is no such cluster.
        """
        with _connected(self.address) as ray:
            actors = self._actors(ray, per_core=per_core, gpus=gpus)
            yield RayNodes(ray, actors, *_load(ray, actors, make, log), log)  # Ray ends actors that nothing refers to

    def _actors(self, ray: Any, *, per_core: bool, gpus: bool) -> list[_Actor]:
        """Actors with their shares of the nodes' resources; they start when they are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote, actors = ray.remote(_Worker), []
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            n_cpus, n_gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0) * gpus)
            n_actors = n_cpus if per_core else min(max(1, n_gpus), n_cpus)
            for _ in range(n_actors):
                options = {
                    "num_cpus": n_cpus // n_actors,
                    "num_gpus": min(1, n_gpus),
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                }
                actors.append(_Actor(node["NodeManagerAddress"], remote.options(**options).remote()))
        if not actors:
            raise SettingsError(f"the Ray cluster at {self.address} has no node with CPUs")
        return actors


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """`data.workers.Workers` on a cluster."""

    cluster: RayCluster
    log: Log

    def map(self, function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Arrays]]:
        """See `Workers`."""
        with self.cluster.start(partial(_Preparation, function), self.log, gpus=False, per_core=True) as nodes:
            yield from nodes.map(chunks)


@dataclass(frozen=True, slots=True)
class _Preparation:
    """A function of `data` in an actor."""

    function: Callable[[Any], Arrays]
    notes: tuple[str, ...] = ()

    @property
    def how(self) -> dict[str, Any]:
        return {"transduce": transduce.__version__}

    def __call__(self, chunk: Any) -> Arrays:
        return self.function(chunk)


class _Worker:
    """An object in an actor. It is made by a call, whose errors reach the caller as they are."""

    def load(self, make: Callable[[], Any]) -> tuple[dict[str, Any], Sequence[str]]:
        collect_garbage_rarely()
        self._object = make()
        return self._object.how, self._object.notes

    def call(self, chunk: Any) -> Any:
        return self._object(chunk)


class _Actor(NamedTuple):
    """The handle of a `_Worker`, and the address of its node."""

    node: str
    handle: Any


class _Call(NamedTuple):
    """A chunk, what was sent of it to an actor, and the reference to its result."""

    chunk: Any
    sent: Any
    actor: _Actor
    result: Any


class RayNodes:
    """Actors on the nodes of a cluster, each with the same object; `how` and `notes` are those of the objects."""

    def __init__(self, ray: Any, actors: Sequence[_Actor], how: dict[str, Any], notes: Sequence[str], log: Log) -> None:
        self.how, self.notes, self._ray, self._log = how, notes, ray, log
        self._unfinished: dict[_Actor, list[Any]] = {actor: [] for actor in actors}  # results of their calls

    def translate_all(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Translated]]:
        """See `ChunkTranslator`."""
        return self.map(chunks, lambda chunk: (chunk.first, chunk.lines))

    def map(self, chunks: Iterable[T], sent_of: Callable[[T], Any] = lambda chunk: chunk) -> Iterator[tuple[T, Any]]:
        """Call the objects with what `sent_of` gives of each chunk, several at a time; yield the results in order.

        Raises `TransduceError` when no actor is left.
        """
        waiting: deque[_Call] = deque()
        for chunk in chunks:
            waiting.append(self._send(chunk, sent_of(chunk)))
            if len(waiting) >= _CHUNKS_PER_ACTOR * len(self._unfinished):
                yield self._finish(waiting.popleft())
        while waiting:
            yield self._finish(waiting.popleft())

    def _send(self, chunk: Any, sent: Any) -> _Call:
        """Send a chunk to the actor that has the fewest unfinished calls."""
        if not self._unfinished:
            raise TransduceError("no worker of the Ray cluster is left; the same command resumes")
        for results in self._unfinished.values():
            if results:
                _, results[:] = self._ray.wait(results, num_returns=len(results), timeout=0)
        actor = min(self._unfinished, key=lambda one: len(self._unfinished[one]))
        result = actor.handle.call.remote(sent)
        self._unfinished[actor].append(result)
        return _Call(chunk, sent, actor, result)

    def _finish(self, call: _Call) -> tuple[Any, Any]:
        """Wait for the result of a call; if its actor is lost, for that of another one."""
        while True:
            try:
                return call.chunk, _get(self._ray, call.result)
            except self._ray.exceptions.RayError as error:  # the actor, its node, or the result that was on it
                if self._unfinished.pop(call.actor, None) is not None:
                    n_left = len(self._unfinished)
                    self._log.warn(f"lost the worker on {call.actor.node} ({_reason(error)}); {n_left} are left")
                call = self._send(call.chunk, call.sent)


def _get(ray: Any, result: Any) -> Any:
    """The result of a call. Raises the error that the call has raised as it was there, or one of Ray."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def _load(
    ray: Any, actors: Sequence[_Actor], make: Callable[[], Any], log: Log
) -> tuple[dict[str, Any], Sequence[str]]:
    """Make the object in all actors; returns `how` and `notes`. Raises `SettingsError` if the actors differ."""
    calls = {actor.handle.load.remote(make): actor.node for actor in actors}
    _, waiting = ray.wait([*calls], num_returns=len(calls), timeout=_SECONDS_TO_START)
    if waiting:
        nodes = ", ".join(sorted({calls[call] for call in waiting}))
        log.say(f"waiting for workers on {nodes}; their CPUs may be in use by other jobs of the cluster")
    found: dict[str, tuple[dict[str, Any], Sequence[str]]] = {}
    for call, node in calls.items():
        try:
            found[node] = _get(ray, call)
        except ray.exceptions.RayError as error:
            message = f"no worker starts on {node}: {_reason(error)}; transduce must be installed there"
            raise TransduceError(message) from error
        except TransduceError as error:
            raise type(error)(f"{node}: {error}") from error
    first_node, (first, notes) = next(iter(found.items()))
    for node, (how, _) in found.items():
        for name, value in how.items():
            if value != first.get(name):
                raise SettingsError(
                    f"{name} = {first.get(name)!r} on {first_node} and {value!r} on {node}: "
                    "all nodes need the same model, version of transduce and native library"
                )
    return first, notes


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster. A connection that the program has already is used and kept."""
    try:
        import ray
    except ImportError as error:
        raise SettingsError("a Ray cluster needs Ray: pip install 'transduce[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        if address != "auto":
            _check_address(address)  # Ray would wait for a cluster for minutes
        with _keep_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(
            f"there is no Ray cluster at {address} ({_reason(error)}); give HOST:PORT of its head, or auto on a node"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _reason(error: Exception) -> str:
    """The first line of a message of Ray, which may be long."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__).split(": ")[0][:200]
