"""Which addresses are dialled (row M18)."""

import asyncio
import threading

import pytest

from app.address import SystemResolver, is_allowed
from app.errors import FetchDenied, FetchFailed
from app.fetch import Fetcher, FetchPolicy

PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "193.0.6.139",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "64:ff9b::808:808",
    "::ffff:8.8.8.8",
]
PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "100.127.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "240.0.0.1",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "100::1",
    "2001:10::1",
    "2001:db8::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd12:3456::1",
    "fec0::1",
]
NEVER = [
    "0.0.0.0",
    "0.1.2.3",
    "100.100.100.200",
    "168.63.129.16",
    "169.254.169.254",
    "169.254.170.2",
    "192.0.0.192",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "::",
    "::2",
    "::8.8.8.8",
    "::127.0.0.1",
    "::169.254.169.254",
    "::ffff:0:169.254.169.254",
    "::ffff:0:8.8.8.8",
    "64:ff9b:1::1",
    "64:ff9b:1::a9fe:a9fe",
    "fd00:42::42",
    "fd00:c1::a9fe:a9fe",
    "fd20:ce::254",
    "::ffff:169.254.169.254",
    "::ffff:0.0.0.0",
    "64:ff9b::a9fe:a9fe",
    "2001:0:7f00:1::",
    "2002:7f00:1::",
    "2002:808:808::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
]


@pytest.mark.parametrize(
    ("addresses", "by_default", "with_private"),
    [(PUBLIC, True, True), (PRIVATE, False, True), (NEVER, False, False)],
    ids=["public", "private", "never"],
)
def test_address_classes(addresses: list[str], by_default: bool, with_private: bool) -> None:
    wrong = [address for address in addresses if is_allowed(address, allow_private=False) != by_default]
    assert wrong == []
    wrong = [address for address in addresses if is_allowed(address, allow_private=True) != with_private]
    assert wrong == []


@pytest.fixture
def never_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect_tcp(*args: object) -> None:
        raise AssertionError(f"dialled {args[1:]}")

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect_tcp)


@pytest.mark.usefixtures("never_dialled")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "017700000001",
        "0177.0.0.1",
        "127.0.0.1.",
        "127。0。0。1",
        "localhost",
        "LocalHost.",
        "0",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "[::]",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "[fe80::1%eth0]",
        "[fe80::1%25eth0]",
    ],
)
async def test_every_notation_as_the_system_resolver_reads_it(host: str) -> None:
    fetcher = Fetcher(FetchPolicy(max_bytes=100))
    with pytest.raises(FetchDenied) as caught:
        await fetcher.fetch(f"http://{host}:8080/latest/meta-data?token=secret")
    assert not any(word in str(caught.value) for word in ("127", "169.254", "::", "secret", "latest"))
    await fetcher.close()


async def test_a_name_is_resolved_on_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stalled(*_: object, **__: object) -> list[object]:
        release.wait(10)
        return []

    monkeypatch.setattr("socket.getaddrinfo", stalled)
    fetcher = Fetcher(FetchPolicy(max_bytes=100, connect_timeout_s=0.1))
    try:
        with pytest.raises(FetchFailed, match=r"media\.test does not resolve within 0\.1 s"):
            await fetcher.fetch("http://media.test/")
        async with asyncio.timeout(5):
            assert await asyncio.to_thread(lambda: "free") == "free"
    finally:
        release.set()
        await fetcher.close()


async def test_system_resolver_reads_an_address() -> None:
    resolver = SystemResolver(num_threads=1)
    assert await resolver("127.1", 80) == ["127.0.0.1"]
    resolver.close()


async def test_a_name_that_does_not_resolve() -> None:
    async def no_such_name(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    for resolve in (no_such_name, lambda *_: asyncio.sleep(0, [])):
        fetcher = Fetcher(FetchPolicy(max_bytes=100), resolve)
        with pytest.raises(FetchFailed, match=r"^media\.test does not resolve$"):
            await fetcher.fetch("http://media.test/")
        await fetcher.close()
