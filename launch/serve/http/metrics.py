"""Metrics of the server for Prometheus, from the engine's state and from what the HTTP process observes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# fine where latencies are promised: 5 to 50 ms
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5),
)


class Metrics:
    """Counts and times of one server.

    Args:
        state: The engine's state.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]
        made: dict[str, Any] = {"registry": self._registry}
        self.responses = Counter("ringattn_requests", "Answers by path and status", ["path", "status"], **made)
        self.first_token = Histogram(
            "ringattn_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            **made,
        )
        self.per_token = Histogram(
            "ringattn_time_per_output_token_seconds",
            "Mean time of an answer's later tokens",
            buckets=_TOKEN_SECONDS,
            **made,
        )
        self.latency = Histogram(
            "ringattn_request_seconds", "From a request's arrival to its end", buckets=_SECONDS, **made
        )
        self.cancelled = Counter("ringattn_cancelled", "Answers that nobody waited for any more", **made)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's state."""
        state = self._state()
        totals = state["totals"]
        for name, text in (("running", "Requests in the cache"), ("waiting", "Requests that wait for room")):
            yield GaugeMetricFamily(f"ringattn_requests_{name}", text, value=state[name])
        pages = GaugeMetricFamily("ringattn_cache_pages", "Pages by rank and use", labels=["rank", "use"])
        for use, by_rank in state["pages"].items():
            for rank, value in enumerate(by_rank):
                pages.add_metric([str(rank), use], value)
        yield pages
        yield GaugeMetricFamily("ringattn_cache_page_tokens", "Tokens of a page", value=state["page_size"])
        tokens = CounterMetricFamily("ringattn_tokens", "Tokens computed, shared or generated", labels=["kind"])
        for kind, name in (("prompt", "prompt_tokens"), ("shared", "shared_tokens"), ("generated", "generated_tokens")):
            tokens.add_metric([kind], totals[name])
        yield tokens
        steps = CounterMetricFamily("ringattn_steps", "Steps of the model", labels=["kind"])
        seconds = CounterMetricFamily("ringattn_step_seconds", "Time in steps of the model", labels=["kind"])
        for kind in totals["steps"]:
            steps.add_metric([kind], totals["steps"][kind])
            seconds.add_metric([kind], totals["seconds"][kind])
        yield steps
        yield seconds

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)
