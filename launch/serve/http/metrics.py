"""Metrics of the server for Prometheus, from the engine's state and from what the HTTP process observes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5),
)


class Metrics:
    """Counts and times of one server with a model, and the engine's state, which a function returns."""

    def __init__(self, state: Callable[[], dict[str, Any]], model: str) -> None:
        self._state, self._registry, self._model = state, CollectorRegistry(), model
        self._registry.register(self)  # type: ignore[arg-type]

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"ringattn_{name}_seconds", text, buckets=buckets, registry=self._registry)

        self.responses = Counter(
            "ringattn_requests", "Answers by path and status", ["path", "status"], registry=self._registry
        )
        self.cancelled = Counter("ringattn_cancelled", "Answers whose client went away", registry=self._registry)
        self.finished = Counter(
            "ringattn_finished", "Answers by reason of their end", ["reason"], registry=self._registry
        )
        self.first_token = histogram("time_to_first_token", "From a request's arrival to its first token")
        self.per_token = histogram("time_per_output_token", "Mean time of an answer's later tokens", _TOKEN_SECONDS)
        self.latency = histogram("request", "From a request's arrival to its end")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's state."""
        state = self._state()
        totals, pages_by_use = state["totals"], state["pages"]
        info = GaugeMetricFamily("ringattn_model_info", "1, with the model as a label", labels=["model"])
        info.add_metric([self._model], 1)
        yield info
        used, every = sum(pages_by_use["running"]), sum(map(sum, pages_by_use.values()))
        yield GaugeMetricFamily("ringattn_cache_usage_ratio", "Share of pages that requests hold", value=used / every)
        yield SummaryMetricFamily(
            "ringattn_queue_seconds", "From arrival to admission", totals["admitted"], totals["queue_seconds"]
        )
        for name, text in (("running", "Requests in the cache"), ("waiting", "Requests that wait for room")):
            yield GaugeMetricFamily(f"ringattn_requests_{name}", text, value=state[name])
        pages = GaugeMetricFamily("ringattn_cache_pages", "Pages by rank and use", labels=["rank", "use"])
        for use, by_rank in pages_by_use.items():
            for rank, value in enumerate(by_rank):
                pages.add_metric([str(rank), use], value)
        yield pages
        yield GaugeMetricFamily("ringattn_cache_page_tokens", "Tokens of a page", value=state["page_size"])
        size = state["bytes_per_token"]
        yield GaugeMetricFamily(
            "ringattn_cache_bytes_per_token", "Bytes of a token in the cache, all layers", value=size
        )
        host = state["host"]
        yield CounterMetricFamily(
            "ringattn_preemptions", "Requests that had to wait again for pages", value=totals["preemptions"]
        )
        yield GaugeMetricFamily("ringattn_host_pages", "Pages in host memory, all ranks", value=sum(host["used"]))
        moved = CounterMetricFamily(
            "ringattn_host_bytes", "Bytes of pages moved between GPUs and host memory, all ranks", labels=["direction"]
        )
        for direction in ("saved", "loaded"):
            moved.add_metric([direction], host[f"{direction}_bytes"])
        yield moved
        tokens = {kind: totals[f"{kind}_tokens"] for kind in ("prompt", "shared", "host", "generated")}
        for name, text, by_kind in (
            ("tokens", "Tokens computed, shared, of these from host memory, or generated", tokens),
            ("steps", "Steps of the model", totals["steps"]),
            ("step_seconds", "Time in steps of the model", totals["seconds"]),
        ):
            family = CounterMetricFamily(f"ringattn_{name}", text, labels=["kind"])
            for kind, value in by_kind.items():
                family.add_metric([kind], value)
            yield family

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
