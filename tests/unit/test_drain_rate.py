"""The measured rate: an average that follows, in which long batches say more than short ones."""

import pytest

from app.drain_rate import DrainRate


def test_without_a_measurement_it_says_what_it_is_told() -> None:
    rate = DrainRate()
    assert rate.per_s == 0
    assert rate.seconds(1000) == 1.0
    assert rate.seconds(1000, unknown_s=0.25) == 0.25


def test_it_is_an_average_that_follows() -> None:
    rate = DrainRate()
    rate.add(1000, 0.5)
    assert rate.seconds(1000) == pytest.approx(0.5)
    for _ in range(50):
        rate.add(4000, 1.0)
    assert rate.seconds(4000) == pytest.approx(1.0, rel=0.01)


def test_a_thumbnail_says_little_of_how_long_a_full_batch_takes() -> None:
    rate = DrainRate()
    rate.add(60_000, 0.1)
    for _ in range(3):
        rate.add(256, 0.001)  # less than half as fast
    assert rate.seconds(60_000) == pytest.approx(0.1, rel=0.05)
