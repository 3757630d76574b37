"""Metrics of the server, in Prometheus' text format."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Upper bounds of the latencies that are counted together, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics:
    """Requests, their latency, and micro-batches.

    Requests are counted by route, never by address, so that the number of labels is bounded.
    """

    def __init__(self, num_entities: Mapping[str, int]) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.in_progress = Gauge(
            "dualkg_requests_in_progress", "Requests not yet answered.", registry=registry
        )
        self._requests = Counter(
            "dualkg_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dualkg_request_seconds",
            "Latency by route.",
            ["route"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._batches = Counter("dualkg_batches", "Micro-batches of queries.", registry=registry)
        self._queries = Counter(
            "dualkg_queries", "Queries answered in micro-batches.", registry=registry
        )
        self._largest_batch = Gauge(
            "dualkg_largest_batch", "Queries of the largest micro-batch.", registry=registry
        )
        self._largest_so_far = 0

        start_time = Gauge("dualkg_start_time_seconds", "Start of the server.", registry=registry)
        start_time.set_to_current_time()
        self._entities = Gauge(
            "dualkg_entities", "Entities of each run.", ["run"], registry=registry
        )
        for run, number in num_entities.items():
            self.add_run(run, number)

    def add_run(self, run: str, num_entities: int) -> None:
        self._entities.labels(run).set(num_entities)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, size: int) -> None:
        self._batches.inc()
        self._queries.inc(size)
        self._largest_so_far = max(self._largest_so_far, size)
        self._largest_batch.set(self._largest_so_far)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
