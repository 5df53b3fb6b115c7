"""The cache's own numbers, as a scrape shows them."""

from app.gauges import install_cache_series
from app.metrics import Metrics
from app.store import EmbeddingStore, StoredEmbedding, StoreStats, TierStats
from tests.scrape import samples_of
from tests.stored import DTYPE, WIDTH, entry, key


def found_in(metrics: Metrics) -> dict[str, float]:
    return {
        name.removeprefix("moonvit_cache_"): value
        for name, value in samples_of(metrics.exposition("")[0].decode()).items()
        if name.startswith("moonvit_cache_")
    }


def test_every_number_is_shown_under_its_own_name() -> None:
    metrics = Metrics()
    stats = StoreStats(
        100, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, disk=TierStats(11, 12, 13, 14, 15, 16, 17, 18), shared=TierStats(21, 22)
    )
    install_cache_series(metrics, lambda: stats)
    found = found_in(metrics)
    assert {name: value for name, value in found.items() if 'tier="shared"' not in name} == {
        "limit_bytes": 100,
        "hits_total": 1,
        "misses_total": 2,
        "joined_total": 3,
        'evictions_total{tier="memory"}': 4,
        "not_kept_total": 5,
        "lease_refusals_total": 6,
        'damaged_total{tier="memory"}': 7,
        'bytes{tier="memory"}': 8,
        "entries": 9,
        "leased_bytes": 10,
        'tier_hits_total{tier="disk"}': 11,
        'tier_misses_total{tier="disk"}': 12,
        'writes_total{tier="disk"}': 13,
        'dropped_writes_total{tier="disk"}': 14,
        'damaged_total{tier="disk"}': 15,
        'evictions_total{tier="disk"}': 16,
        'tier_failures_total{tier="disk"}': 17,
        'bytes{tier="disk"}': 18,
    }
    assert found['tier_misses_total{tier="shared"}'] == 22


async def test_a_real_store_is_read_as_it_is() -> None:
    metrics = Metrics()
    store = EmbeddingStore(10_000, width=WIDTH, dtype=DTYPE)
    install_cache_series(metrics, lambda: store.stats)
    await store.start()

    async def compute() -> StoredEmbedding:
        return entry(1)

    await store.fetch_or_compute(key(1), compute)
    assert store.get(key(1)) is not None
    assert store.get(key(2)) is None
    found = found_in(metrics)
    await store.close()
    assert (found["hits_total"], found["misses_total"], found["entries"]) == (1, 2, 1)
    assert found['bytes{tier="memory"}'] > 64
    assert not [name for name in found if "disk" in name or "shared" in name]
