"""What of the settings decides batches and their queue."""

import pytest

from app.policies import LEAST_BATCH_PATCHES, batch_budget, fitted_budget
from app.service import QUEUED_BATCHES, Service
from app.settings import InvalidSettings, Settings
from encoder import largest_segment, load_config

CONFIG = load_config("demo:k3-tiny")


def test_a_batch_may_be_smaller_than_the_largest_segment() -> None:
    assert batch_budget(Settings(), CONFIG) == largest_segment(CONFIG.media) > LEAST_BATCH_PATCHES
    assert batch_budget(Settings(max_batch_patches=LEAST_BATCH_PATCHES), CONFIG) == LEAST_BATCH_PATCHES
    with pytest.raises(InvalidSettings, match="--max-batch-patches 4095: allowed from 4096 on"):
        batch_budget(Settings(max_batch_patches=LEAST_BATCH_PATCHES - 1), CONFIG)


@pytest.mark.parametrize(
    ("asked", "fits", "budget"),
    [
        (None, None, 71424),
        (None, 10**6, 71424),  # more in a batch would gain nothing, and keep others waiting
        (None, 30_000, 30_000),
        (None, 100, LEAST_BATCH_PATCHES),
        (50_000, 30_000, 50_000),  # who asks for it gets it
    ],
)
def test_what_fits_into_memory_bounds_the_default(asked: int | None, fits: int | None, budget: int) -> None:
    assert fitted_budget(Settings(max_batch_patches=asked), load_config("demo:k3"), fits) == budget


@pytest.mark.parametrize("towers", [1, 3])
def test_the_queue_grows_with_the_towers(towers: int) -> None:
    service = Service(Settings(device="cpu", data_parallel_size=towers, max_batch_patches=5000))
    assert service.max_queued_patches == towers * QUEUED_BATCHES * 5000
    bounded = Service(Settings(device="cpu", data_parallel_size=towers, max_queued_patches=77))
    assert bounded.max_queued_patches == 77
