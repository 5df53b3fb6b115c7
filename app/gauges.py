"""What a scrape reads from the running service. Nothing here waits: not for the device, nor for a decoder."""

import platform
from collections.abc import Callable
from importlib.metadata import version

from app.metrics import TOWER_RESTART_REASONS, Metrics
from app.service import Service
from app.store import StoreStats, TierStats


def install_gauges(metrics: Metrics, service: Service) -> None:
    """Let the gauges of state show `service` as it is at the moment of each scrape."""
    metrics.ready.set_function(lambda: service.obstacle() is None)
    metrics.requests_in_flight.set_function(lambda: service.lifecycle.in_flight)
    metrics.requests_limit.set(service.settings.max_requests)
    metrics.queue_patches.set_function(lambda: service.queued_patches)
    metrics.queue_limit_patches.set(service.max_queued_patches)
    metrics.queued_bytes.set_function(lambda: service.queued_bytes)
    metrics.queued_limit_bytes.set(service.settings.max_queued_bytes)
    metrics.running_batch_seconds.set_function(lambda: service.running_batch_s)
    metrics.decode_jobs.labels("image", "running").set_function(lambda: service.decode_jobs("image").running)
    metrics.decode_jobs.labels("image", "waiting").set_function(lambda: service.decode_jobs("image").waiting)
    metrics.decode_jobs.labels("video", "running").set_function(lambda: service.decode_jobs("video").running)
    metrics.decode_jobs.labels("video", "waiting").set_function(lambda: service.decode_jobs("video").waiting)
    metrics.build_info.labels(version("moonvit-serve"), platform.python_version(), version("torch")).set(1)
    for number in range(len(service.tower_statuses)):
        _install_tower(metrics, number, service)
    install_cache_series(metrics, lambda: service.store_stats)


def _install_tower(metrics: Metrics, number: int, service: Service) -> None:
    tower = str(number)
    metrics.tower_up.labels(tower).set_function(lambda: service.tower_statuses[number].state == "up")
    outstanding = metrics.tower_outstanding_patches.labels(tower)
    outstanding.set_function(lambda: service.tower_statuses[number].outstanding_patches)
    failed = metrics.attention_out_of_service.labels(tower)
    failed.set_function(lambda: len(service.tower_statuses[number].out_of_service))
    metrics.tower_batches.labels(tower)
    for reason in TOWER_RESTART_REASONS:
        metrics.tower_restarts.labels(tower, reason)


def install_cache_series(metrics: Metrics, stats: Callable[[], StoreStats]) -> None:
    """Let the cache's series show `stats()` at each scrape; a tier that is not there has none."""
    metrics.cache_hits.set_function(lambda: stats().hits)
    metrics.cache_misses.set_function(lambda: stats().misses)
    metrics.cache_joined.set_function(lambda: stats().joined)
    metrics.cache_lease_refusals.set_function(lambda: stats().lease_refusals)
    metrics.cache_not_kept.set_function(lambda: stats().not_kept)
    metrics.cache_evictions.set_function(lambda: stats().evictions, "memory")
    metrics.cache_damaged.set_function(lambda: stats().damaged, "memory")
    metrics.cache_bytes.labels("memory").set_function(lambda: stats().bytes)
    metrics.cache_limit_bytes.set(stats().max_bytes)
    metrics.cache_leased_bytes.set_function(lambda: stats().leased_bytes)
    metrics.cache_entries.set_function(lambda: stats().entries)
    if stats().disk is not None:
        _install_tier(metrics, "disk", lambda: stats().disk)
    if stats().shared is not None:
        _install_tier(metrics, "shared", lambda: stats().shared)


def _install_tier(metrics: Metrics, tier: str, stats: Callable[[], TierStats | None]) -> None:
    def read(name: str) -> Callable[[], float]:
        return lambda: getattr(stats(), name, 0)

    metrics.cache_tier_hits.set_function(read("hits"), tier)
    metrics.cache_tier_misses.set_function(read("misses"), tier)
    metrics.cache_tier_failures.set_function(read("failures"), tier)
    metrics.cache_writes.set_function(read("writes"), tier)
    metrics.cache_dropped_writes.set_function(read("dropped_writes"), tier)
    metrics.cache_damaged.set_function(read("damaged"), tier)
    metrics.cache_evictions.set_function(read("evictions"), tier)
    metrics.cache_bytes.labels(tier).set_function(read("bytes"))
