"""`ByteBudget`: what is held together stays within the bound, and what is given back can be taken again."""

import pytest

from app.budget import ByteBudget
from app.errors import Overloaded


def test_shares_together_stay_within_the_bound() -> None:
    budget = ByteBudget(100, "fetched media")
    with budget.hold() as one, budget.hold() as other:
        one.take(60)
        other.take(40)
        with pytest.raises(Overloaded) as caught:
            other.take(1)
        assert str(caught.value) == "100 bytes of fetched media are held and this one has 1 more, limit 100"
        assert (budget.held_bytes, one.num_bytes, other.num_bytes) == (100, 60, 40)
    assert budget.held_bytes == 0


def test_a_share_is_given_back_whatever_ends_its_block() -> None:
    budget = ByteBudget(100, "x")

    def fail() -> None:
        with budget.hold() as share:
            share.take(100)
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert budget.held_bytes == 0


def test_one_alone_may_take_more_than_the_bound() -> None:
    budget = ByteBudget(100, "x")
    with budget.hold() as large:
        large.take(70)
        large.take(70)
        with budget.hold() as small, pytest.raises(Overloaded):
            small.take(1)
    with budget.hold() as small, budget.hold() as large:
        small.take(1)
        with pytest.raises(Overloaded):
            large.take(100)


def test_checking_takes_nothing() -> None:
    budget = ByteBudget(100, "x")
    with budget.hold() as one, budget.hold() as other:
        one.check(100)
        one.take(10)
        other.check(90)
        with pytest.raises(Overloaded):
            other.check(91)
        assert budget.held_bytes == 10
