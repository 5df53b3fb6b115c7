"""Limits per key, on a clock that the test moves."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Overloaded
from app.key_file import Limit
from app.key_limits import Caller, TokenBucket
from app.problems import retry_after


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def caller(limit: Limit, clock: Clock, refused: list[str] | None = None) -> Caller:
    return Caller("a", limit, clock, [].append if refused is None else refused.append)


def admitted(one: Caller) -> bool:
    try:
        with one.admit():
            return True
    except Overloaded:
        return False


class TestRate:
    def test_a_burst_then_the_rate(self) -> None:
        clock = Clock()
        one = caller(Limit(requests_per_s=2, burst=3), clock)
        assert [admitted(one) for _ in range(5)] == [True, True, True, False, False]
        clock.now_s += 0.5
        assert [admitted(one) for _ in range(2)] == [True, False]
        clock.now_s += 3600
        assert [admitted(one) for _ in range(4)] == [True, True, True, False]

    @pytest.mark.parametrize(("rate", "size"), [(0.1, 1), (1, 1), (2.5, 3), (40, 40)])
    def test_the_burst_is_one_seconds_worth_unless_it_is_said(self, rate: float, size: int) -> None:
        one = caller(Limit(requests_per_s=rate), Clock())
        assert [admitted(one) for _ in range(size + 1)] == [True] * size + [False]

    @pytest.mark.parametrize(
        ("rate", "waited_s", "header"), [(0.1, 0, "10"), (0.1, 0.5, "10"), (0.4, 0, "3"), (50, 0, "1")]
    )
    def test_retry_after_is_not_too_early(self, rate: float, waited_s: float, header: str) -> None:
        clock = Clock()
        one = caller(Limit(requests_per_s=rate, burst=1), clock)
        assert admitted(one)
        clock.now_s += waited_s
        with pytest.raises(Overloaded, match=rf"this key may send {rate:g} requests/s") as caught, one.admit():
            pass
        assert retry_after(caught.value) == {"Retry-After": header}
        clock.now_s += int(header)
        assert admitted(one)

    @pytest.mark.parametrize("rate", [1e-300, 5e-324])
    def test_a_rate_next_to_nothing_is_a_day(self, rate: float) -> None:
        one = caller(Limit(requests_per_s=rate, burst=1), Clock())
        assert admitted(one)
        with pytest.raises(Overloaded) as caught, one.admit():
            pass
        assert retry_after(caught.value) == {"Retry-After": "86400"}

    @given(
        rate=st.floats(0.01, 1000),
        size=st.integers(1, 50),
        pauses_s=st.lists(st.floats(0, 20), max_size=60),
    )
    def test_no_more_than_the_burst_and_the_rate_ever(self, rate: float, size: int, pauses_s: list[float]) -> None:
        clock = Clock()
        bucket = TokenBucket(rate, size, clock)
        taken = 0
        for pause_s in pauses_s:
            clock.now_s += pause_s
            before_s = clock.now_s
            wait_s = bucket.take()
            if not wait_s:
                taken += 1
            else:
                clock.now_s = before_s + wait_s + 1e-6
                assert bucket.take() == 0.0  # exactly when it was told
                taken += 1
            assert taken <= size + (clock.now_s - 1000.0) * rate + 1e-3


class TestInFlight:
    def test_one_more_is_refused_until_one_is_done(self) -> None:
        one = caller(Limit(max_requests=2), Clock(), refused := [])
        with ExitStack() as first, ExitStack() as second:
            first.enter_context(one.admit())
            second.enter_context(one.admit())
            with pytest.raises(Overloaded, match=r"2 requests of this key are in flight, limit 2"), one.admit():
                pass
            first.close()
            assert admitted(one)
        assert one.in_flight == 0
        assert refused == ["max_requests"]

    def test_a_request_that_fails_gives_its_place_back(self) -> None:
        one = caller(Limit(max_requests=1), Clock())
        with pytest.raises(ZeroDivisionError), one.admit():
            raise ZeroDivisionError
        assert admitted(one)

    def test_a_refusal_costs_no_token(self) -> None:
        one = caller(Limit(requests_per_s=0.001, burst=2, max_requests=1), Clock(), refused := [])
        with one.admit():
            assert not admitted(one)
        assert admitted(one)
        assert not admitted(one)
        assert refused == ["max_requests", "requests_per_s"]


class TestNewLimits:
    def test_reading_the_file_again_gives_no_new_burst(self) -> None:
        one = caller(Limit(requests_per_s=0.01, burst=1), Clock())
        assert admitted(one)
        one.set_limit(Limit(requests_per_s=0.01, burst=5))
        assert not admitted(one)

    def test_a_smaller_burst_holds_at_once(self) -> None:
        one = caller(Limit(requests_per_s=0.01, burst=50), Clock())
        one.set_limit(Limit(requests_per_s=0.01, burst=2))
        assert [admitted(one) for _ in range(3)] == [True, True, False]

    def test_a_limit_that_goes_is_gone(self) -> None:
        one = caller(Limit(requests_per_s=0.01, burst=1, max_requests=1), Clock())
        assert admitted(one)
        one.set_limit(Limit())
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(one.admit())
