"""Metrics of a service in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from transduce.decoding.queue import SECONDS
from transduce.serving.service import Service

_LOAD = {
    "n_waiting": ("transduce_queue_sentences", "Sentences that wait for decoding."),
    "n_waiting_tokens": ("transduce_queue_tokens", "Source tokens of the sentences that wait."),
    "n_open": ("transduce_open_sentences", "Sentences that wait or are being decoded."),
}
_WORK = {
    "n_steps": ("transduce_decoding_steps", "Decoding steps."),
    "n_rows": ("transduce_decoding_rows", "Hypotheses in these steps; rows / steps is the mean batch size."),
    "n_new": ("transduce_new_tokens", "Tokens of the best translations, and of the texts of language models."),
}


class Metrics:
    """Counters of one service; `text` is the page for Prometheus. No labels come from the client's data."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        requests = Counter(
            "transduce_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._requests: Callable[[str, int], Counter] = cache(requests.labels)  # cached: the library's lookup is slower
        seconds = Histogram(
            "transduce_request_seconds", "Time to the response.", ["route"], buckets=SECONDS, registry=self._registry
        )
        self._seconds: Callable[[str], Histogram] = cache(seconds.labels)
        self.n_characters = 0

    def count(self, route: str, status: int, seconds: float, n_characters: int) -> None:
        """Count a response, and the characters of texts that it translates."""
        if status == 200:
            self.n_characters += n_characters
        self._requests(route, status).inc()
        self._seconds(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The current values; prometheus_client calls this."""
        pending = {"requests": self._service.n_requests, "tokens": self._service.admission.n_tokens}
        for name, value in pending.items():
            yield GaugeMetricFamily(f"transduce_pending_{name}", f"Pending {name}, waiting or running.", value)
        help_text = "Characters of the texts that were translated."
        yield CounterMetricFamily("transduce_characters", help_text, self.n_characters)
        runs = self._service.runs
        loads = [(run.name, {**run.model.queue.workload(), "n_new": run.model.n_new}) for run in runs]
        families: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], dict[str, tuple[str, str]]], ...]
        families = (GaugeMetricFamily, _LOAD), (CounterMetricFamily, _WORK)
        for family, names in families:
            for key, (name, help_text) in names.items():
                metric = family(name, help_text, labels=["run"])
                for label, load in loads:
                    if key in load:
                        metric.add_metric([label], load[key])
                yield metric
        help_text = "Time of the sentences of a call from the queue to the last result."
        times = HistogramMetricFamily("transduce_decoding_seconds", help_text, labels=["run"])
        for run in runs:
            buckets = zip([*map(str, SECONDS), "+Inf"], accumulate(run.model.queue.n_calls), strict=True)
            times.add_metric([run.name], list(buckets), run.model.queue.call_seconds)
        yield times
