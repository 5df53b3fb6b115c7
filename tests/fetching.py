"""A `Fetcher` for tests against servers on loopback."""

import ssl

import pytest

from app.errors import FetchFailed
from app.fetch import Fetcher, FetchPolicy
from encoder.errors import EncoderError

PNG = b"\x89PNG" + bytes(range(256))
NAMES = {"media.test": ["127.0.0.1"], "other.test": ["127.0.0.1"], "media.invalid": ["10.0.0.1"]}
# Reading certifi's roots for every fetcher would be most of the tests' time.
TRUST_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def resolve(host: str, port: int) -> list[str]:
    return NAMES.get(host, [host])


def policy(**changes: object) -> FetchPolicy:
    """Loopback allowed and short times, so that no test waits long."""
    values: dict[str, object] = {
        "allow_private": True,
        "max_bytes": 1_000_000,
        "connect_timeout_s": 2.0,
        "idle_timeout_s": 2.0,
        "total_timeout_s": 5.0,
    }
    return FetchPolicy(**(values | changes))  # type: ignore[arg-type]


async def fetch(url: str, **changes: object) -> bytes:
    fetcher = Fetcher(policy(**changes), resolve, ssl_context=TRUST_NOBODY)
    try:
        return await fetcher.fetch(url)
    finally:
        await fetcher.close()


async def failure(url: str, kind: type[EncoderError] = FetchFailed, **changes: object) -> str:
    """The message of the error that fetching ends in, which never holds more of the URL than its host's name."""
    with pytest.raises(kind) as caught:
        await fetch(url, **changes)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert not any(word in message for word in ("http:", "127.0.0.1", "/a", "token", "secret"))
    return message
