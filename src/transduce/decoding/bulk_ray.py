"""Bulk translation on the nodes of a Ray cluster.

This process reads and writes the files and sends chunks of lines to actors, each with its own model. If a node fails,
the others translate its chunks. A chunk is written once, when its translation is here: no line is lost or doubled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from transduce.decoding.bulk_workers import Setup, Translated, Translators, Worker, result_of
from transduce.errors import SettingsError, TransduceError
from transduce.logging import Log

_CALLS = 2  # per actor: the next chunk is there when one is done
_SECONDS_TO_START = 20.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The nodes of a Ray cluster, as the `workers` of `translate_to_folder`.

    Every node with CPUs runs `workers_per_node` actors, which divide its cores and GPUs. transduce must be installed
    there, and the run folder must have the same path; the files are needed here only.

    Args:
        address: HOST:PORT of the cluster's head, of which this machine is a node, or "auto".
        workers_per_node: Actors per node, at most one per core.
    """

    address: str = "auto"
    workers_per_node: int = 1

    @contextlib.contextmanager
    def open_translators(self, setup: Setup, log: Log) -> Iterator[Translators]:
        """Load the model on all nodes. Raises `SettingsError` if there is no such cluster."""
        setup = replace(setup, run=os.path.abspath(setup.run))
        with _connected(self.address) as ray, _started(ray, self._actors(ray, setup)) as actors:
            loaded = _load(ray, actors, setup, log)
            pool = _Pool(ray, actors, log)
            threads = ThreadPoolExecutor(_CALLS * len(actors), thread_name_prefix="ray")
            try:
                yield Translators(
                    **loaded,
                    n=_CALLS * len(actors),
                    submit=lambda *chunk: threads.submit(pool.translate, *chunk).result,
                )
            finally:
                pool.close()
                threads.shutdown(wait=False, cancel_futures=True)

    def _actors(self, ray: Any, setup: Setup) -> list[_Actor]:
        """Actors with their shares of the nodes' resources; they start when they are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote, actors = ray.remote(Worker), []
        for node in ray.nodes():
            resources = node["Resources"] if node["Alive"] else {}
            n_cpus, n_gpus = int(resources.get("CPU", 0)), resources.get("GPU", 0) * (setup.device != "cpu")
            n = min(self.workers_per_node, n_cpus)
            for _ in range(n):
                options = {
                    "num_cpus": n_cpus // n,
                    "num_gpus": min(1, n_gpus / n),
                    "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                }
                actors.append(_Actor(node["NodeManagerAddress"], remote.options(**options).remote()))
        if not actors:
            raise SettingsError(f"the Ray cluster at {self.address} has no node with CPUs")
        return actors


class _Actor(NamedTuple):
    """The handle of a `Worker`, and the address of its node."""

    node: str
    handle: Any


class _Pool:
    """Gives chunks to free actors, and those of a lost actor to others."""

    def __init__(self, ray: Any, actors: Sequence[_Actor], log: Log) -> None:
        self._ray, self._log, self._lock = ray, log, threading.Lock()
        self._left, self._closed = list(actors), False
        self._free: SimpleQueue[_Actor | None] = SimpleQueue()  # None: no actor is left
        for actor in [*actors] * _CALLS:
            self._free.put(actor)

    def translate(self, first: int, lines: list[str]) -> Translated:
        """Translate a chunk. Raises `TransduceError` when all actors are lost."""
        while (actor := self._free.get()) is not None:
            try:
                answer = self._ray.get(actor.handle.translate.remote(first, lines))
            except self._ray.exceptions.RayTaskError:
                raise  # an error in our code
            except self._ray.exceptions.RayError as error:  # the actor, its node, or the result that was on it
                self._remove(actor, error)
            else:
                self._free.put(actor)
                return Translated(**result_of(answer))
        self._free.put(None)
        raise TransduceError("no worker of the Ray cluster is left; the same command resumes")

    def close(self) -> None:
        """Forget the actors; calls that wait for one end."""
        self._closed = True
        self._free.put(None)

    def _remove(self, actor: _Actor, error: Exception) -> None:
        with self._lock:
            if actor not in self._left or self._closed:
                return
            self._left.remove(actor)
            self._log.warn(f"lost the worker on {actor.node} ({_reason(error)}); {len(self._left)} are left")
            if not self._left:
                self._free.put(None)


def _load(ray: Any, actors: Sequence[_Actor], setup: Setup, log: Log) -> dict[str, Any]:
    """Load the model in all actors: what they have in common. Raises `SettingsError` if they differ."""
    calls = {actor.handle.load.remote(asdict(setup)): actor.node for actor in actors}
    _, waiting = ray.wait([*calls], num_returns=len(calls), timeout=_SECONDS_TO_START)
    if waiting:
        nodes = ", ".join(sorted({calls[call] for call in waiting}))
        log.say(f"waiting for workers on {nodes}; their CPUs may be in use by other jobs of the cluster")
    loaded = []
    for call, node in calls.items():
        try:
            loaded.append(result_of(ray.get(call)))
        except ray.exceptions.RayActorError as error:
            message = f"no worker starts on {node}: {_reason(error)}; transduce must be installed there"
            raise TransduceError(message) from error
        except TransduceError as error:
            raise type(error)(f"{node}: {error}") from error
    for one, node in zip(loaded, calls.values(), strict=True):
        first, first_node = loaded[0], next(iter(calls.values()))
        if other := [key for key, value in one["how"].items() if value != first["how"].get(key)]:
            raise SettingsError(
                f"{other[0]} = {first['how'].get(other[0])!r} on {first_node} and {one['how'][other[0]]!r} on {node}: "
                "all nodes need the same model, version of transduce and native library"
            )
    return loaded[0]


@contextlib.contextmanager
def _started(ray: Any, actors: list[_Actor]) -> Iterator[list[_Actor]]:
    try:
        yield actors
    finally:
        for actor in actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor.handle)


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
