"""`Fetcher` against real servers on loopback: what it sends and follows, whom it trusts (rows M16-M18)."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpcore
import pytest

from app.errors import FetchDenied, FetchFailed, InvalidRequest
from app.fetch import Fetcher
from encoder.errors import EncoderError, SetupError
from tests.fetching import PNG, TRUST_NOBODY, failure, fetch, policy, resolve
from tests.raw_server import chunked, redirect, response, serve


async def test_request_and_body() -> None:
    async with serve(response(200, PNG, content_type="text/html")) as server:
        assert await fetch(f"http://media.test:{server.port}/a.png?b=%3A#c") == PNG
        assert server.targets == ["/a.png?b=%3A"]
        assert server.headers() == {
            "host": f"media.test:{server.port}",
            "user-agent": "moonvit-serve",
            "accept": "*/*",
            "accept-encoding": "identity",
            "connection": "close",
        }


@pytest.mark.parametrize("target", ["/a%3Ab%3a?s=%2F/%2f&t=a+b%20c==", "//a/../b;c?", "/%zz|^{}\"<>`'"])
async def test_target_arrives_byte_for_byte_also_after_a_redirect(target: str) -> None:
    async with serve(response(200, PNG)) as server:
        url = f"http://media.test:{server.port}{target}"
        async with serve(redirect(url)) as first:
            assert await fetch(url) == PNG
            assert await fetch(f"http://other.test:{first.port}/") == PNG
        assert server.targets == [target, target]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(response(200, PNG)) as server:
        assert await fetch(f"http://media.test:{server.port}/") == PNG


async def test_body_without_a_length() -> None:
    async with serve({"/c": chunked(PNG, PNG), "/e": response(200, PNG, content_length=None)}) as server:
        assert await fetch(f"http://media.test:{server.port}/c") == PNG + PNG
        assert await fetch(f"http://media.test:{server.port}/e") == PNG


async def test_ipv6() -> None:
    try:
        async with serve(response(200, PNG), host="::1") as server:
            assert await fetch(f"http://[::1]:{server.port}/") == PNG
            assert server.headers()["host"] == f"[::1]:{server.port}"
    except OSError:
        pytest.skip("no IPv6 loopback here")


async def test_the_next_address_is_dialled_when_one_refuses() -> None:
    async def two(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async with serve(response(200, PNG)) as server:
        assert await Fetcher(policy(), two, ssl_context=TRUST_NOBODY).fetch(f"http://media.test:{server.port}/") == PNG


async def test_a_hundred_at_a_time_within_the_connection_limits() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(response(200, PNG))

    async with serve(slowly) as server:
        fetcher = Fetcher(policy(max_connections=12, max_connections_per_host=8), resolve, ssl_context=TRUST_NOBODY)
        urls = [f"http://{'media' if index % 2 else 'other'}.test:{server.port}/{index}" for index in range(100)]
        assert await asyncio.gather(*map(fetcher.fetch, urls)) == [PNG] * 100
        assert sorted(server.targets) == sorted(f"/{index}" for index in range(100))
        assert 9 <= server.max_open <= 12
        server.max_open = 0
        await asyncio.gather(*(fetcher.fetch(f"http://media.test:{server.port}/") for _ in range(20)))
        assert server.max_open <= 8


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int) -> None:
    async with serve(response(200, PNG)) as last:
        answers = {
            "/a/b?c": redirect("../d", status),
            "/d": redirect("?e=%3A", status),
            "/d?e=%3A": redirect(f"http://other.test:{last.port}/f", status),
        }
        async with serve(answers) as server:
            assert await fetch(f"http://media.test:{server.port}/a/b?c") == PNG
            assert server.targets == ["/a/b?c", "/d", "/d?e=%3A"]
            assert last.headers()["host"] == f"other.test:{last.port}"


async def test_a_circle_ends() -> None:
    async with serve(redirect("/")) as server:
        assert await failure(f"http://media.test:{server.port}/a") == "media.test redirects more than 3 times"
        assert len(server.heads) == 4
        await failure(f"http://media.test:{server.port}/a", max_redirects=0)
        assert len(server.heads) == 5


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("file:///etc/passwd", FetchDenied),
        ("data:image/png;base64,AAAA", FetchDenied),
        ("http://169.254.169.254/latest/meta-data", FetchDenied),
        ("http://[::]/", FetchDenied),
        ("http://x@media.test/", FetchFailed),
        ("http:\\\\media.test/", FetchFailed),
        ("\xff", FetchFailed),
    ],
)
async def test_redirects_elsewhere_are_refused(location: str, kind: type[EncoderError]) -> None:
    answer = redirect("LOCATION").replace(b"LOCATION", location.encode("latin-1"))
    async with serve(answer) as server:
        await failure(f"http://media.test:{server.port}/a?token=secret", kind)
        assert len(server.heads) == 1


async def test_redirect_without_a_location() -> None:
    async with serve(response(302)) as server:
        assert "answered 302 without" in await failure(f"http://media.test:{server.port}/")


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses connected to; every one of them leads to loopback here."""
    addresses: list[str] = []
    connect: Callable[..., Awaitable[object]] = httpcore.AnyIOBackend.connect_tcp

    async def connect_tcp(backend: httpcore.AnyIOBackend, host: str, *args: object) -> object:
        addresses.append(host)
        return await connect(backend, "127.0.0.1", *args)

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect_tcp)
    return addresses


def answering_in_turn(*answers: list[str]) -> tuple[Callable[[str, int], Awaitable[list[str]]], list[str]]:
    """A resolver that answers otherwise each time, and the names it was asked for."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    return rebinding, asked


async def test_a_name_is_resolved_once_and_that_address_dialled(dialled: list[str]) -> None:
    rebinding, asked = answering_in_turn(["8.8.8.8"], ["127.0.0.1"])
    async with serve(response(200, PNG)) as server:
        fetcher = Fetcher(policy(allow_private=False), rebinding, ssl_context=TRUST_NOBODY)
        url = f"http://media.test:{server.port}/"
        assert await fetcher.fetch(url) == PNG
        assert (asked, dialled) == (["media.test"], ["8.8.8.8"])
        with pytest.raises(FetchDenied, match=r"media\.test is not at a public address"):
            await fetcher.fetch(url)
        assert dialled == ["8.8.8.8"]


async def test_one_private_address_among_public_ones_is_enough(dialled: list[str]) -> None:
    rebinding, _ = answering_in_turn(["8.8.8.8", "2606:4700::1111", "10.0.0.1"])
    with pytest.raises(FetchDenied):
        await Fetcher(policy(allow_private=False), rebinding, ssl_context=TRUST_NOBODY).fetch("http://media.test/")
    assert dialled == []


async def test_a_redirect_to_a_private_address_is_not_dialled(dialled: list[str]) -> None:
    for location in ("http://127.0.0.1:{port}/secret", "http://media.test:{port}/secret"):
        rebinding, _ = answering_in_turn(["8.8.8.8"], ["127.0.0.1"])
        async with serve(b"") as server:
            server.answers = redirect(location.format(port=server.port))
            with pytest.raises(FetchDenied):
                await Fetcher(policy(allow_private=False), rebinding, ssl_context=TRUST_NOBODY).fetch(
                    f"http://media.test:{server.port}/"
                )
            assert server.targets == ["/"]
    assert dialled == ["8.8.8.8"] * 2


async def test_user_information_and_backslashes_reach_nothing(dialled: list[str]) -> None:
    for url in ("http://good@127.0.0.1/", "http://good.test\\@127.0.0.1/", "http://good.test\\.evil.test/"):
        with pytest.raises(InvalidRequest, match=r"user information|backslash"):
            await fetch(url)
    assert dialled == []


async def test_allowed_domains_hold_at_every_hop() -> None:
    async with serve(b"") as server:
        server.answers = {"/a": response(200, PNG), "/go": redirect(f"http://other.test:{server.port}/a")}
        url = f"http://MEDIA.test.:{server.port}"
        allowed = frozenset({"Media.TEST", "bücher.test"})
        assert await fetch(url + "/a", allowed_domains=allowed) == PNG
        assert (await failure(url + "/go", FetchDenied, allowed_domains=allowed)).startswith("other.test is not among")
        assert server.targets == ["/a", "/go"]
        for domains in ({"edia.test"}, {"test"}, set(), {"a.media.test"}):
            await failure(url + "/a", FetchDenied, allowed_domains=frozenset(domains))
        assert len(server.heads) == 2


async def test_allowed_domains_open_no_private_address() -> None:
    await failure(
        "http://media.invalid/", FetchDenied, allow_private=False, allowed_domains=frozenset({"media.invalid"})
    )


@pytest.mark.parametrize("domain", ["https://media.test", "media.test:80", "*.media.test", "", "a b"])
def test_allowed_domains_that_are_none_stop_the_start(domain: str) -> None:
    with pytest.raises(SetupError, match="host names"):
        Fetcher(policy(allowed_domains=frozenset({domain})))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate and key for media.test, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes a certificate with openssl, which is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "both.pem"
    subject = ["-subj", "/CN=media.test", "-addext", "subjectAltName=DNS:media.test", "-days", "2"]
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", pem]
    subprocess.run([openssl, "req", "-x509", *subject, *new_key], check=True, capture_output=True)
    pem.write_text(pem.read_text() + key.read_text())
    return pem


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_tls_verifies_the_name_while_dialling_the_address(certificate: Path, server_tls: ssl.SSLContext) -> None:
    trusting = ssl.create_default_context(cafile=certificate)
    async with serve(response(200, PNG), tls=server_tls) as server:
        fetcher = Fetcher(policy(), resolve, ssl_context=trusting)
        assert await fetcher.fetch(f"https://media.test:{server.port}/a") == PNG
        assert server.names == ["media.test"]
        assert server.headers()["host"] == f"media.test:{server.port}"
        with pytest.raises(FetchFailed, match=r"^other\.test offers no trusted TLS connection$"):
            await fetcher.fetch(f"https://other.test:{server.port}/a")
        assert len(server.heads) == 1


async def test_tls_from_an_unknown_issuer_is_refused(server_tls: ssl.SSLContext) -> None:
    async with serve(response(200, PNG), tls=server_tls) as server:
        assert "no trusted TLS" in await failure(f"https://media.test:{server.port}/a")
        assert server.heads == []


async def test_no_step_from_https_down_to_http(certificate: Path, server_tls: ssl.SSLContext) -> None:
    async with serve(redirect("http://media.test/"), tls=server_tls) as server:
        fetcher = Fetcher(policy(), resolve, ssl_context=ssl.create_default_context(cafile=certificate))
        with pytest.raises(FetchDenied, match="from https to http"):
            await fetcher.fetch(f"https://media.test:{server.port}/a")
