"""`Metrics`: every series of `GET /metrics`, declared once. Values are counted where things happen; docs/metrics.md."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

OUTCOMES = ("ok", "partial", "client_left", "aborted")  # of a request, beside the problem codes
KINDS = ("image", "video", "unknown")  # unknown: failed before its bytes said what it is
STAGES = ("fetch", "decode_wait", "decode", "preprocess", "queue", "encode", "deliver")
DROP_REASONS = ("client_left", "deadline", "shutdown", "overload", "sibling_failed")
PRIORITIES = ("interactive", "batch")
UNAUTHORIZED_REASONS = ("missing", "malformed", "unknown")
TOWER_RESTART_REASONS = ("crashed", "device_failed", "stalled", "failed")
RESTART_REASONS = ("crashed", "deadline", "cancelled", "planned", "failed")

# From a thumbnail on an idle GPU to the default deadline of a request.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# The loop owes answers in milliseconds; a tenth of a second is a fault.
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_PATCHES = tuple(2**n for n in range(6, 18))  # 64 (a thumbnail) to 131,072; the default budget is 71,424
_SEGMENTS = tuple(2**n for n in range(10))  # 1 to 512


class Metrics:
    """The series of one service, in a registry of its own, so that several can live in one process.

    Series without a writer have no value until there is one: those of a cache tier that is not there, and of a device
    before it is ready.

    Args:
        problem_codes: codes a request or item can fail with; they are counted from zero, so that the first is seen.
    """

    def __init__(self, problem_codes: Iterable[str] = ()) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        def read_counter(name: str, meaning: str, *labels: str) -> ReadCounter:
            return ReadCounter(name, meaning, labels, registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(name, meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, meaning, labels, buckets=buckets, registry=registry)

        # ---- requests and items
        self.requests = counter(
            "moonvit_requests_total",
            "Requests to /v1/encode that have ended: ok, partial, a problem's code, client_left, or aborted.",
            "code",
        )
        self.requests_in_flight = gauge("moonvit_requests_in_flight", "Requests to /v1/encode being worked on.")
        self.requests_limit = gauge("moonvit_requests_limit", "Requests in flight beyond which more are refused.")
        self.request_seconds = histogram(
            "moonvit_request_duration_seconds",
            "From arrival to the last byte of the answer, of requests that ended ok or partial.",
            _SECONDS,
        )
        self.unauthorized = counter(
            "moonvit_unauthorized_total",
            "Requests without a valid API key: missing, malformed (no Bearer), or unknown.",
            "reason",
        )
        self.key_requests = counter("moonvit_key_requests_total", "Requests to any route by their key's name.", "key")
        self.key_refusals = counter(
            "moonvit_key_refusals_total",
            "Requests to /v1/encode beyond what their key may send: requests_per_s or max_requests.",
            "key",
            "limit",
        )
        self.items = counter(
            "moonvit_items_total",
            "Pictures and films that have ended: ok, a problem's code, or dropped with their request.",
            "kind",
            "code",
        )
        self.drops = counter(
            "moonvit_drops_total",
            "Items given up: client_left, deadline, shutdown, overload (the queue was full), "
            "or sibling_failed (another failed the whole request).",
            "reason",
        )
        self.stage_seconds = histogram(
            "moonvit_stage_duration_seconds",
            "Time in fetch, decode_wait, decode, preprocess, queue and encode of an item; deliver of an answer.",
            _SECONDS,
            "stage",
        )

        # ---- queue and device
        self.queue_patches = gauge("moonvit_queue_patches", "Patches that wait for the device: the autoscaling signal.")
        self.queue_limit_patches = gauge(
            "moonvit_queue_limit_patches", "Patches that may wait; items beyond are refused with 429."
        )
        self.queued_bytes = gauge(
            "moonvit_queued_bytes", "Bytes of decoded pixels that wait for the device, in host memory."
        )
        self.queued_limit_bytes = gauge(
            "moonvit_queued_limit_bytes", "Bytes of pixels that may wait; items beyond are refused with 429."
        )
        self.queue_wait_seconds = histogram(
            "moonvit_queue_wait_seconds",
            "Wait of an item's slowest segment for the device, by the priority of its request.",
            _SECONDS,
            "priority",
        )
        self.dropped_patches = counter(
            "moonvit_dropped_patches_total", "Patches that left the queue uncomputed: nobody waited for them any more."
        )
        self.batch_patches = histogram("moonvit_batch_patches", "Patches of a batch, of all that were run.", _PATCHES)
        self.batch_segments = histogram(
            "moonvit_batch_segments",
            "Segments (pictures, chunks of films) of a batch, of all that were run.",
            _SEGMENTS,
        )
        self.batches = counter(
            "moonvit_batches_total",
            "Batches by outcome: ok, halved (failed, its halves were run), retried (lost with its tower, or out of "
            "memory beside another batch: run again), failed (nothing left to halve).",
            "outcome",
        )
        self.attention_batches = counter(
            "moonvit_attention_batches_total", "Batches by the attention backend that was chosen for them.", "backend"
        )
        self.patches = counter("moonvit_patches_total", "Patches encoded.")
        self.tokens = counter("moonvit_tokens_total", "Rows of embeddings computed.")
        self.device_busy_seconds = counter(
            "moonvit_device_busy_seconds_total",
            "Time the devices ran batches, the mean of all towers; its rate is the busy share.",
        )
        self.running_batch_seconds = gauge(
            "moonvit_running_batch_seconds", "Age of the batch that runs now; 0 if none does."
        )
        self.tower_up = gauge("moonvit_tower_up", "1 while a tower can run batches; numbered as in /v1/info.", "tower")
        self.tower_outstanding_patches = gauge(
            "moonvit_tower_outstanding_patches",
            "Patches of the batches a tower has been given and not answered.",
            "tower",
        )
        self.attention_out_of_service = gauge(
            "moonvit_attention_out_of_service",
            "Attention backends of a tower that failed while they served; `towers` in /v1/info says which and why.",
            "tower",
        )
        self.tower_batches = counter("moonvit_tower_batches_total", "Batches that a tower has run.", "tower")
        self.tower_restarts = counter(
            "moonvit_tower_restarts_total",
            "Tower processes replaced: crashed, device_failed, stalled (no answer in time), failed (it did not load).",
            "tower",
            "reason",
        )

        # ---- decoding
        self.decode_jobs = gauge(
            "moonvit_decode_jobs", "Pictures and films being decoded (running) or waiting for it.", "kind", "state"
        )
        self.decode_worker_restarts = counter(
            "moonvit_decode_worker_restarts_total",
            "Processes that decode, replaced: crashed, deadline (of one item), cancelled (nobody waited for its item), "
            "planned (it has had its number of items), failed (it did not start, or answered nonsense).",
            "kind",
            "reason",
        )

        # ---- embedding cache: it keeps its own numbers
        self.cache_hits = read_counter(
            "moonvit_cache_hits_total", "Lookups of an embedding that were answered, from whichever tier."
        )
        self.cache_misses = read_counter(
            "moonvit_cache_misses_total", "Lookups that were not, or led to a computation."
        )
        self.cache_joined = read_counter(
            "moonvit_cache_joined_total", "Lookups that waited for another's of the same embedding."
        )
        self.cache_lease_refusals = read_counter(
            "moonvit_cache_lease_refusals_total", "Leases refused because leased embeddings already fill their share."
        )
        self.cache_not_kept = read_counter(
            "moonvit_cache_not_kept_total", "Embeddings not kept in memory: too large, or leases left no room."
        )
        self.cache_evictions = read_counter("moonvit_cache_evictions_total", "Embeddings evicted for room.", "tier")
        self.cache_damaged = read_counter(
            "moonvit_cache_damaged_total", "Stored embeddings that failed verification and were removed.", "tier"
        )
        self.cache_tier_hits = read_counter(
            "moonvit_cache_tier_hits_total", "Loads from a tier below memory that found a sound value.", "tier"
        )
        self.cache_tier_misses = read_counter("moonvit_cache_tier_misses_total", "Loads that found none.", "tier")
        self.cache_tier_failures = read_counter(
            "moonvit_cache_tier_failures_total",
            "Operations on a tier below memory that failed or took too long.",
            "tier",
        )
        self.cache_writes = read_counter(
            "moonvit_cache_writes_total", "Embeddings written to a tier below memory.", "tier"
        )
        self.cache_dropped_writes = read_counter(
            "moonvit_cache_dropped_writes_total",
            "Embeddings not written: too many waited, too large, or the tier fails.",
            "tier",
        )
        self.cache_bytes = gauge("moonvit_cache_bytes", "Bytes held by a tier; 0 where it cannot be known.", "tier")
        self.cache_limit_bytes = gauge("moonvit_cache_limit_bytes", "Bytes the cache may hold in memory.")
        self.cache_leased_bytes = gauge("moonvit_cache_leased_bytes", "Bytes in memory that leases keep there.")
        self.cache_entries = gauge("moonvit_cache_entries", "Embeddings in memory.")

        # ---- the process
        self.ready = gauge("moonvit_ready", "1 while requests are taken, 0 while starting, draining or failed.")
        self.event_loop_lag_seconds = histogram(
            "moonvit_event_loop_lag_seconds",
            "How late a timer of the event loop fires, measured all the time.",
            _LAG_SECONDS,
        )
        self.build_info = gauge("moonvit_build_info", "1; the labels say what runs.", "version", "python", "torch")
        self.model_info = gauge(
            "moonvit_model_info",
            "1 once ready; the labels say which model runs where.",
            "model",
            "family",
            "fingerprint",
            "device",
            "dtype",
            "attention",
        )
        ProcessCollector(registry=registry)

        codes = sorted(set(problem_codes))
        for code in (*OUTCOMES, *codes):
            self.requests.labels(code)
        for kind in KINDS:
            for code in ("ok", "dropped", *codes):
                self.items.labels(kind, code)
        for reason in DROP_REASONS:
            self.drops.labels(reason)
        for stage in STAGES:
            self.stage_seconds.labels(stage)
        for priority in PRIORITIES:
            self.queue_wait_seconds.labels(priority)
        for outcome in ("ok", "halved", "retried", "failed"):
            self.batches.labels(outcome)
        for reason in UNAUTHORIZED_REASONS:
            self.unauthorized.labels(reason)
        for reason in RESTART_REASONS:
            for kind in ("image", "video"):
                self.decode_worker_restarts.labels(kind, reason)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All series as text, and its content type: OpenMetrics where `accept` asks for it, else Prometheus' own."""
        encode, content_type = choose_encoder(accept)
        return encode(_WithoutCreated(self.registry)), content_type


class ReadCounter(Collector):
    """A counter of a part that keeps its own numbers: read from there at each scrape, as `Gauge.set_function` does."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        self.labelnames = labels
        self._name, self._meaning = name, meaning
        self._readings: dict[tuple[str, ...], Callable[[], float]] = {}
        registry.register(self)

    def set_function(self, read: Callable[[], float], *labels: str) -> None:
        """Show what `read` returns; the number may only grow."""
        self._readings[labels] = read

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._meaning, labels=self.labelnames)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self.labelnames)
        for labels, read in self._readings.items():
            family.add_metric(labels, read())
        yield family


class _WithoutCreated(Collector):
    """A registry without the time every series was made at, which would nearly double the number of series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
