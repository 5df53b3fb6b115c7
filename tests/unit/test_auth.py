"""Who a request is from: headers against keys, keys that come and go, and what is counted."""

from pathlib import Path

import pytest

from app import auth
from app.auth import Keys, open_keys
from app.errors import Unauthorized
from app.key_file import Limit, load_keys
from app.metrics import Metrics
from app.problems import problem_headers
from app.settings import InvalidSettings, Settings
from tests.scrape import nonzero, samples_of

A, B, C = (f"key-of-{name}-0123456789" for name in "abc")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"a:{A}\nb:{B} max_requests=1\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def keys(path: Path, metrics: Metrics) -> Keys:
    return Keys(path, metrics)


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"{scheme} {key}".encode())]


def who(keys: Keys, headers: list[tuple[bytes, bytes]], path: str = "/v1/encode") -> str | None:
    caller = keys.identify(path, headers)
    return None if caller is None else caller.name


def counted(metrics: Metrics, name: str) -> dict[str, float]:
    return nonzero(samples_of(metrics.exposition("")[0].decode()), name)


class TestIdentify:
    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
    def test_each_key_is_its_callers(self, keys: Keys, scheme: str) -> None:
        assert (who(keys, bearer(A, scheme)), who(keys, bearer(B, scheme))) == ("a", "b")

    @pytest.mark.parametrize(
        ("headers", "reason", "challenge"),
        [
            ([], "missing", "Bearer"),
            ([(b"x-api-key", A.encode())], "missing", "Bearer"),
            (bearer(A, "Basic"), "malformed", 'Bearer error="invalid_token"'),
            (bearer(""), "malformed", 'Bearer error="invalid_token"'),
            ([(b"authorization", A.encode())], "malformed", 'Bearer error="invalid_token"'),
            (bearer(A) + bearer(A), "malformed", 'Bearer error="invalid_token"'),
            (bearer("x" * 513), "malformed", 'Bearer error="invalid_token"'),
            (bearer(C), "unknown", 'Bearer error="invalid_token"'),
            (bearer(A + "x"), "unknown", 'Bearer error="invalid_token"'),
            (bearer(A[:-1]), "unknown", 'Bearer error="invalid_token"'),
            (bearer(A.upper()), "unknown", 'Bearer error="invalid_token"'),
            ([(b"authorization", b"Bearer \xff\xfe")], "unknown", 'Bearer error="invalid_token"'),
        ],
    )
    def test_anything_else_is_refused_and_counted_by_its_reason(
        self, keys: Keys, metrics: Metrics, headers: list[tuple[bytes, bytes]], reason: str, challenge: str
    ) -> None:
        with pytest.raises(Unauthorized) as caught:
            keys.identify("/v1/encode", headers)
        assert caught.value.reason == reason
        assert problem_headers(caught.value) == {"WWW-Authenticate": challenge}
        assert A not in str(caught.value)
        assert counted(metrics, "moonvit_unauthorized_total") == {f'{{reason="{reason}"}}': 1}
        assert counted(metrics, "moonvit_key_requests_total") == {}

    def test_the_hash_of_a_key_is_no_key(self, path: Path, metrics: Metrics) -> None:
        digest = load_keys(path)[0].digest.hex()
        path.write_text(f"a:sha256:{digest}\n")
        keys = Keys(path, metrics)
        assert who(keys, bearer(A)) == "a"
        for wrong in (digest, f"sha256:{digest}"):
            with pytest.raises(Unauthorized):
                who(keys, bearer(wrong))

    @pytest.mark.parametrize("key", [A, B, C])
    def test_every_key_is_compared_whichever_it_is(self, key: str, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[bytes, bytes]] = []

        def compare(one: bytes, other: bytes) -> bool:
            compared.append((one, other))
            return one == other

        monkeypatch.setattr(auth, "compare_digest", compare)
        try:
            keys.identify("/v1/encode", bearer(key))
        except Unauthorized:
            assert key == C
        assert [len(one) for pair in compared for one in pair] == [32] * 4

    @pytest.mark.parametrize("route", ["/health", "/health/live", "/health/ready", "/problems/unauthorized"])
    def test_probes_and_explanations_are_open(self, keys: Keys, metrics: Metrics, route: str) -> None:
        assert who(keys, [], route) is None
        assert who(keys, bearer(C), route) is None
        assert counted(metrics, "moonvit_unauthorized_total") == {}

    @pytest.mark.parametrize(
        "route", ["/", "/metrics", "/v1/info", "/v1/models", "/docs", "/openapi.json", "/nope", "/health/", "/healthx",
                 "/problems", "//problems/x", "/health/../v1/info"]
    )  # fmt: skip
    def test_everything_else_is_not(self, keys: Keys, route: str) -> None:
        with pytest.raises(Unauthorized):
            who(keys, [], route)

    def test_metrics_are_open_where_that_is_asked_for(self, path: Path) -> None:
        settings = Settings(api_key_file=path, metrics_without_key=True)
        keys = open_keys(settings, Metrics())
        assert keys is not None
        assert who(keys, [], "/metrics") is None
        with pytest.raises(Unauthorized):
            who(keys, [], "/v1/info")


class TestReplace:
    def test_the_new_file_holds_from_the_next_request_on(self, keys: Keys, path: Path, metrics: Metrics) -> None:
        who(keys, bearer(A))
        path.write_text(f"b:{C}\nc:{A}\n")
        keys.replace(load_keys(path))
        assert (who(keys, bearer(C)), who(keys, bearer(A))) == ("b", "c")
        with pytest.raises(Unauthorized):
            who(keys, bearer(B))
        # The series of names that are gone are gone too: a file that changes every day makes no more of them.
        assert counted(metrics, "moonvit_key_requests_total") == {'{key="b"}': 1, '{key="c"}': 1}
        assert 'key="a"' not in metrics.exposition("")[0].decode()

    def test_callers_that_stay_keep_what_they_have_in_flight(self, keys: Keys, path: Path) -> None:
        caller = keys.identify("/v1/encode", bearer(B))
        assert caller is not None
        with caller.admit():
            path.write_text(f"b:{C} max_requests=1\n")
            keys.replace(load_keys(path))
            again = keys.identify("/v1/encode", bearer(C))
            assert again is caller
            assert again.in_flight == 1

    def test_a_caller_that_is_gone_finishes_and_its_late_refusals_are_not_lost_in_an_error(
        self, keys: Keys, path: Path, metrics: Metrics
    ) -> None:
        caller = keys.identify("/v1/encode", bearer(B))
        assert caller is not None
        with caller.admit():
            path.write_text(f"a:{A}\n")
            keys.replace(load_keys(path))
        assert caller.in_flight == 0
        assert 'key="b"' not in metrics.exposition("")[0].decode()


class TestSettings:
    def test_without_a_file_there_are_no_keys(self) -> None:
        assert open_keys(Settings(), Metrics()) is None

    @pytest.mark.parametrize("name", ["key_requests_per_s", "key_burst", "key_max_requests"])
    def test_limits_per_key_need_keys(self, name: str) -> None:
        with pytest.raises(InvalidSettings, match=f"--{name.replace('_', '-')} needs --api-key-file"):
            open_keys(Settings(**{name: 3}), Metrics())

    def test_a_burst_needs_a_rate(self, path: Path) -> None:
        with pytest.raises(InvalidSettings, match="--key-burst needs --key-requests-per-s"):
            open_keys(Settings(api_key_file=path, key_burst=3), Metrics())

    def test_the_settings_are_the_defaults_of_every_line(self, path: Path) -> None:
        settings = Settings(api_key_file=path, key_requests_per_s=7, key_burst=9, key_max_requests=5)
        keys = open_keys(settings, Metrics())
        assert keys is not None
        a, b = (keys.identify("/v1/encode", bearer(key)) for key in (A, B))
        assert a is not None
        assert b is not None
        assert (a.limit, b.limit) == (Limit(7, 9, 5), Limit(7, 9, 1))
