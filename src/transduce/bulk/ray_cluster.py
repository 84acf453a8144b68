"""Bulk translation on the nodes of a Ray cluster.

This process reads and writes the files, and sends chunks to actors, each with its own model. If a node fails, other
nodes compute its chunks. Each chunk is written once, after its result has arrived, so no line is lost or doubled.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transduce.data.workers import ChunkT
from transduce.errors import SettingsError, TransduceError, needing
from transduce.logging import Log
from transduce.process import collect_garbage_rarely

_CHUNKS_PER_ACTOR = 4  # unfinished chunks per actor, so that no actor waits for its next chunk
_SECONDS_TO_START = 20.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The nodes of a Ray cluster, for `translate_to_folder`.

    A node with CPUs runs one actor with all its cores. A node with several GPUs runs an actor per GPU. Every node needs
    transduce and the run folder, at the same path. Input files are needed only on this machine.

    Args:
        address: HOST:PORT of the head of the cluster, which this machine belongs to, or "auto".
        log: Log for messages about nodes (default: to stderr).
    """

    address: str = "auto"
    log: Log = field(default_factory=Log)

    @contextlib.contextmanager
    def start(self, make: Callable[[], Any], *, gpus: bool) -> Iterator[RayNodes]:
        """Start actors on all nodes, each with an object from `make`, such as a `ChunkTranslator`.

        `RayNodes.map` calls these objects. Raises `SettingsError` if there is no such cluster.
        """
        with _connected(self.address) as ray:
            actors = self._actors(ray, gpus=gpus)
            # keep a reference: Ray ends actors without references
            yield RayNodes(ray, actors, make, self.log)

    def _actors(self, ray: Any, *, gpus: bool) -> list[_Actor]:
        """Create actors and divide each node's resources among them. An actor starts when its resources are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote, actors = ray.remote(_Worker), []
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            n_cpus, n_gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0) * gpus)
            n_actors = min(max(1, n_gpus), n_cpus)
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


class _Worker:
    """An actor. `load` creates its object, and not the constructor, so that errors reach the caller unchanged."""

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


class RayNodes:
    """Actors on the nodes of a cluster, each with an equal object. `how`, `notes`: the attributes of these objects."""

    def __init__(self, ray: Any, actors: Sequence[_Actor], make: Callable[[], Any], log: Log) -> None:
        self._ray, self._log = ray, log
        self._unfinished: dict[_Actor, list[Any]] = {actor: [] for actor in actors}  # results of each actor's calls
        self.how, self.notes = self._load(make)

    def _load(self, make: Callable[[], Any]) -> tuple[dict[str, Any], Sequence[str]]:
        """Create the object in all actors. Returns its `how` and `notes`. Raises `SettingsError` if they differ."""
        calls = {actor.handle.load.remote(make): actor.node for actor in self._unfinished}
        _, waiting = self._ray.wait([*calls], num_returns=len(calls), timeout=_SECONDS_TO_START)
        if waiting:
            nodes = ", ".join(sorted({calls[call] for call in waiting}))
            self._log.say(f"waiting for workers on {nodes}; their CPUs may be in use by other jobs of the cluster")
        loaded: dict[str, tuple[dict[str, Any], Sequence[str]]] = {}
        for call, node in calls.items():
            try:
                loaded[node] = self._get(call)
            except self._ray.exceptions.RayError as error:
                message = f"no worker starts on {node}: {_reason(error)}; transduce must be installed there"
                raise TransduceError(message) from error
            except TransduceError as error:
                raise type(error)(f"{node}: {error}") from error
        first_node, (first, notes) = next(iter(loaded.items()))
        for node, (how, _) in loaded.items():
            for name, value in how.items():
                if value != first.get(name):
                    raise SettingsError(
                        f"{name} = {first.get(name)!r} on {first_node} and {value!r} on {node}: "
                        "all nodes need the same model, version of transduce and native library"
                    )
        return first, notes

    def _get(self, result: Any) -> Any:
        """Return the result of a call. Raises the error that the call raised in the actor, or an error of Ray."""
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def map(self, chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Any]]:
        """Call the actors' objects with chunks, several at a time. Yields each chunk with its result, in order.

        Raises `TransduceError` when no actor is left.
        """
        waiting: deque[tuple[ChunkT, _Actor, Any]] = deque()  # chunks, their actors, and references to their results
        for chunk in chunks:
            waiting.append((chunk, *self._send(chunk)))
            if len(waiting) >= _CHUNKS_PER_ACTOR * len(self._unfinished):
                yield self._finish(*waiting.popleft())
        while waiting:
            yield self._finish(*waiting.popleft())

    def _send(self, chunk: Any) -> tuple[_Actor, Any]:
        """Send a chunk to the actor with the fewest unfinished calls. Returns the actor, and the result's reference."""
        if not self._unfinished:
            raise TransduceError("no worker of the Ray cluster is left; the same command resumes")
        for results in self._unfinished.values():
            if results:
                _, results[:] = self._ray.wait(results, num_returns=len(results), timeout=0)
        actor = min(self._unfinished, key=lambda actor: len(self._unfinished[actor]))
        result = actor.handle.call.remote(chunk)
        self._unfinished[actor].append(result)
        return actor, result

    def _finish(self, chunk: ChunkT, actor: _Actor, result: Any) -> tuple[ChunkT, Any]:
        """Wait for the result of a chunk. If its actor is lost, send the chunk to another actor."""
        while True:
            try:
                return chunk, self._get(result)
            except self._ray.exceptions.RayError as error:  # the actor, its node, or the result on the node is lost
                if self._unfinished.pop(actor, None) is not None:
                    n_left = len(self._unfinished)
                    self._log.warn(f"lost the worker on {actor.node} ({_reason(error)}); {n_left} are left")
                actor, result = self._send(chunk)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster. An existing connection of the process is used and kept."""
    with needing("ray", "a Ray cluster needs Ray"):
        import ray
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address != "auto":  # check the address first: Ray would wait for minutes for a cluster
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(
            f"there is no Ray cluster at {address} ({_reason(error)}); give HOST:PORT of its head, or auto on a node"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced the handler
    try:
        yield ray
    finally:
        ray.shutdown()


def _reason(error: Exception) -> str:
    """Shorten an error message of Ray, which may be long, to the first part of its first line."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__).split(": ")[0][:200]
