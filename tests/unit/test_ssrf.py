"""No URL, redirect or DNS answer makes the service connect where it must not (row M18): every notation of an address,
every trick with a host, and every turn a name server can take, refused before anything is dialled."""

import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpcore
import pytest

from app.errors import FetchDenied, FetchFailed, InvalidRequest
from app.fetch import Fetcher
from encoder.errors import EncoderError
from tests.fetching import PNG, TRUST_NOBODY, policy
from tests.raw_server import redirect, response, serve

PUBLIC = "93.184.215.14"

# Hosts that are an address, each in the spelling an attacker would choose. The system's own resolver reads them.
ADDRESSES = {
    "loopback": [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0X7F.0.0.1",
        "017700000001",
        "0177.0.0.1",
        "0000177.0.0.01",
        "127.000.000.001",
        "127.0.0.1.",
        "127.255.255.254",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[0000:0000:0000:0000:0000:0000:0000:0001]",
    ],
    "unspecified": ["0", "0.0.0.0", "0x0", "00", "0.1.2.3", "[::]", "[0::0]"],
    "private": ["10.0.0.1", "10.1", "0xa000001", "172.16.0.1", "172.31.255.254", "192.168.1.1", "192.168.257"],
    "shared (CGNAT)": ["100.64.0.1", "100.127.255.254", "0x64400001"],
    "link-local": ["169.254.1.1", "[fe80::1]", "[fe80::1%eth0]", "[fe80::1%25eth0]", "[fe80::1%1]", "[febf::1]"],
    "metadata": [
        "169.254.169.254",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "2852039166",
        "169.254.43518",
        "169.254.170.2",  # AWS ECS
        "169.254.42.42",  # Scaleway
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
        "[fd00:ec2::254]",
        "[fd00:ec2::23]",  # AWS EKS
        "[fd00:c1::a9fe:a9fe]",  # Oracle
        "[fd00:42::42]",  # Scaleway
        "[fd20:ce::254]",  # Google
        "[fe80::a9fe:a9fe]",  # OpenStack
    ],
    "multicast and broadcast": ["224.0.0.1", "239.255.255.250", "255.255.255.255", "0xffffffff", "[ff02::1]"],
    "documentation and reserved": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "240.0.0.1"],
    "unique local": ["[fc00::1]", "[fd12:3456:789a::1]", "[fec0::1]"],
    "IPv4 inside IPv6": [
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:ffff:127.0.0.1]",
        "[::ffff:169.254.169.254]",
        "[::ffff:10.0.0.1]",
        "[::127.0.0.1]",
        "[::7f00:1]",
        "[::a9fe:a9fe]",
        "[::ffff:0:127.0.0.1]",  # translated
        "[64:ff9b::127.0.0.1]",  # NAT64
        "[64:ff9b::a9fe:a9fe]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[2002:7f00:1::]",  # 6to4
        "[2002:a9fe:a9fe::1]",
        "[2001:0:4136:e378:8000:63bf:3fff:fdd2]",  # Teredo
        "[2001::1]",
    ],
    "other characters": [
        "\uff11\uff12\uff17.0.0.1",  # full-width digits
        "\u2460\u2461\u2466.0.0.1",  # circled
        "\U0001d7cf27.0.0.1",  # mathematical bold
        "127\u30020\u30020\u30021",  # ideographic full stops
        "127\uff0e0\uff0e0\uff0e1",  # full-width ones
        "\uff10x7f000001",
        "169\uff61254\uff61169\uff61254",
    ],
}
DENIED = [(family, host) for family, hosts in ADDRESSES.items() for host in hosts]

# No URL at all: the same strings mean different hosts to different parsers, so they mean none here.
MALFORMED = [
    "http://good.test@127.0.0.1/",
    "http://127.0.0.1@good.test/",
    "http://good.test:80@127.0.0.1:80/",
    "http://good.test%40127.0.0.1/",
    "http://user:word@good.test/",
    "http://@127.0.0.1/",
    "http://good.test\\@127.0.0.1/",
    "http://good.test\\.127.0.0.1/",
    "http:\\\\127.0.0.1/",
    "http:/\\127.0.0.1/",
    "http:127.0.0.1/",
    "http:/127.0.0.1/",
    "http:///127.0.0.1/",
    "http:////127.0.0.1/",
    "http://127.0.0.1 .good.test/",
    "http://127.0.0.1\t/",
    "http://127.0.0.1\r\nHost: good.test/",
    "http://127.0.0.1\x00.good.test/",
    "http://%31%32%37.0.0.1/",
    "http://127.0.0.1%00.good.test/",
    "http://127.0.0.1%2f.good.test/",
    "http://127%2E0%2E0%2E1/",
    "http://[127.0.0.1]/",
    "http://[::1].good.test/",
    "http://[::1/",
    "http://::1/",
    "http://[::ffff:0x7f.0.0.1]/",
    "http://[::1]@good.test/",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:65536/",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:80:80/",
    "http://127.0.0.1:-80/",
    "http://127.0.0.1:+80/",
    "http://127.0.0.1:8\uff10/",
    "http://127.0.0.1:0x50/",
    "http://127.0.0.1..:80/",
    "http://127..0.0.1/",
    "http://.127.0.0.1/",
    "http://good.test\u2044@127.0.0.1/",
    "http://good.test\uff0f127.0.0.1/",
    "http://good.test\uff20127.0.0.1/",
    "http://127.0.0.1\u200b\u2028/",
    "//127.0.0.1/",
    "/etc/passwd",
    "127.0.0.1",
]

SCHEMES = [
    "file:///etc/passwd",
    "FILE://localhost/etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "dict://127.0.0.1:11211/stat",
    "ldap://127.0.0.1/",
    "jar:http://127.0.0.1!/",
    "unix:/run/docker.sock",
    "ws://127.0.0.1/",
    "netdoc:/etc/passwd",
    "javascript:1",
    "blob:http://127.0.0.1/x",
    "view-source:http://127.0.0.1/",
]


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses connected to; only those that look public get anywhere: to a server on loopback."""
    addresses: list[str] = []
    connect = httpcore.AnyIOBackend.connect_tcp

    async def connect_tcp(backend: httpcore.AnyIOBackend, host: str, *rest: Any) -> Any:
        addresses.append(host)
        return await connect(backend, "127.0.0.1", *rest)

    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect_tcp)
    return addresses


class Dns:
    """A name server's zone in place of the system's: every name has its answers in turn, the last of them for ever.

    An answer is a list of addresses, or the name that a CNAME record points to.
    """

    def __init__(self, zone: Mapping[str, list[list[str] | str]]) -> None:
        self._zone = {name: list(answers) for name, answers in zone.items()}
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        addresses = self._addresses(host)
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, addresses, strict=True)
        ]

    def _addresses(self, name: str, depth: int = 0) -> list[str]:
        if name not in self._zone or depth > 10:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        answers = self._zone[name]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return self._addresses(answer, depth + 1) if isinstance(answer, str) else answer


def answer_from(monkeypatch: pytest.MonkeyPatch, zone: Mapping[str, list[list[str] | str]]) -> Dns:
    dns = Dns(zone)
    monkeypatch.setattr("app.address.socket.getaddrinfo", dns.getaddrinfo)
    return dns


@pytest.fixture
async def fetcher() -> AsyncIterator[Fetcher]:
    """As by default: nothing private, the system's resolver."""
    made = Fetcher(policy(allow_private=False), ssl_context=TRUST_NOBODY)
    yield made
    await made.close()


async def refusal(fetcher: Fetcher, url: str) -> tuple[type[EncoderError], str]:
    """The error that a URL ends in, and its text, which says nothing of what lies behind the URL."""
    with pytest.raises(EncoderError) as caught:
        await fetcher.fetch(url)
    message = str(caught.value)
    assert not any(word in message for word in ("secret", "meta-data", "127.", "169.254", "::1"))
    return type(caught.value), message


@pytest.mark.parametrize(("family", "host"), DENIED, ids=[f"{family}: {host!a}" for family, host in DENIED])
async def test_an_address_that_is_not_public_is_not_dialled(
    fetcher: Fetcher, dialled: list[str], family: str, host: str
) -> None:
    for url in (f"http://{host}/latest/meta-data", f"https://{host}:8443/?token=secret", f"HTTP://{host}:80"):
        assert (await refusal(fetcher, url))[0] is FetchDenied
    assert dialled == []


@pytest.mark.parametrize("url", MALFORMED, ids=ascii)
async def test_what_two_parsers_could_read_differently_is_no_url(
    fetcher: Fetcher, dialled: list[str], url: str
) -> None:
    with pytest.raises(InvalidRequest):
        await fetcher.fetch(url)
    assert dialled == []


@pytest.mark.parametrize("url", SCHEMES)
async def test_only_http_is_spoken(fetcher: Fetcher, dialled: list[str], url: str) -> None:
    assert (await refusal(fetcher, url))[0] is FetchDenied
    assert dialled == []


@pytest.mark.parametrize("path", ["direct", "redirect"])
async def test_names_of_private_addresses(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    names = ["localhost", "private.nip.test", "metadata.google.internal", "internal", "ip6-localhost", "printer"]
    addresses = ["127.0.0.1", "127.0.0.1", "169.254.169.254", "10.0.0.7", "::1", "fe80::1%eth0"]
    zone: dict[str, list[list[str] | str]] = {name: [[address]] for name, address in zip(names, addresses, strict=True)}
    answer_from(monkeypatch, zone | {"good.test": [[PUBLIC]]})
    async with serve(b"") as server:
        for name in (*names, "LOCALHOST", "localhost.", "\uff4cocalhost", "local\u00adhost"):
            url = f"http://{name}:{server.port}/secret"
            if path == "direct":
                assert (await refusal(fetcher, url))[0] is FetchDenied
                assert dialled == []
            else:
                server.answers = redirect("LOCATION").replace(b"LOCATION", url.encode())
                assert (await refusal(fetcher, f"http://good.test:{server.port}/"))[0] is FetchDenied
                assert set(dialled) == {PUBLIC}
        assert all(target == "/" for target in server.targets)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_no_redirect_leads_where_a_url_may_not(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(
        "app.address.socket.getaddrinfo",
        lambda host, *rest, **named: real(PUBLIC if host == "good.test" else host, *rest, **named),
    )
    locations = [f"{scheme}://{host}:8080/secret" for _, host in DENIED]
    async with serve(b"") as server:
        for location in (*locations, *(f"//{host}/secret" for _, host in DENIED)):
            server.answers = redirect("LOCATION").replace(b"LOCATION", location.encode())
            assert (await refusal(fetcher, f"http://good.test:{server.port}/"))[0] is FetchDenied, location
        assert set(server.targets) == {"/"}
    assert set(dialled) == {PUBLIC}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_to_another_scheme_or_to_no_url(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    answer_from(monkeypatch, {"good.test": [[PUBLIC]], "127.0.0.1": [["127.0.0.1"]]})
    absolute = [url for url in MALFORMED if url.startswith("http") and not set(url) & set("\r\n\x00")]
    async with serve(b"") as server:
        for location in (*SCHEMES, *absolute):
            server.answers = redirect("LOCATION", status).replace(b"LOCATION", location.encode())
            error, _ = await refusal(fetcher, f"http://good.test:{server.port}/")
            assert error is (FetchDenied if location in SCHEMES else FetchFailed), location
        assert set(server.targets) == {"/"}
    assert set(dialled) == {PUBLIC}


async def test_a_name_that_is_rebound_is_checked_each_time(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that was checked is the one that is dialled; the next fetch asks and checks again."""
    dns = answer_from(monkeypatch, {"rebind.test": [[PUBLIC], ["127.0.0.1"]]})
    async with serve({"/": response(200, PNG), "/go": redirect("/secret")}) as server:
        url = f"http://rebind.test:{server.port}/"
        assert await fetcher.fetch(url) == PNG
        assert (dns.asked, dialled) == (["rebind.test"], [PUBLIC])
        assert (await refusal(fetcher, url))[0] is FetchDenied
    answer_from(monkeypatch, {"rebind.test": [[PUBLIC], ["169.254.169.254"]]})
    async with serve({"/go": redirect("/secret")}) as server:  # to the same host, on its second answer
        assert (await refusal(fetcher, f"http://rebind.test:{server.port}/go"))[0] is FetchDenied
        assert server.targets == ["/go"]
    assert dialled == [PUBLIC, PUBLIC]


@pytest.mark.parametrize(
    "answer",
    [
        [PUBLIC, "127.0.0.1"],
        ["127.0.0.1", PUBLIC],
        [PUBLIC, "2606:4700::1111", "::ffff:10.0.0.1"],
        [PUBLIC, "64:ff9b::a9fe:a9fe"],
        [PUBLIC] * 50 + ["fd00:ec2::254"],
    ],
)
async def test_one_address_too_many_closes_the_name(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch, answer: list[str]
) -> None:
    answer_from(monkeypatch, {"mixed.test": [answer]})
    assert (await refusal(fetcher, "http://mixed.test/"))[0] is FetchDenied
    assert dialled == []


async def test_a_chain_of_aliases_counts_by_its_end(
    fetcher: Fetcher, dialled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    zone: dict[str, list[list[str] | str]] = {
        "cdn.test": ["a.test"],
        "a.test": ["b.test"],
        "b.test": ["edge.test", "localhost"],
        "edge.test": [[PUBLIC]],
        "localhost": [["127.0.0.1"]],
        "circle.test": ["circle.test"],
    }
    answer_from(monkeypatch, zone)
    async with serve(response(200, PNG)) as server:
        url = f"http://cdn.test:{server.port}/"
        assert await fetcher.fetch(url) == PNG
        assert (await refusal(fetcher, url))[0] is FetchDenied  # the middle of the chain turned
        error, message = await refusal(fetcher, f"http://circle.test:{server.port}/")
        assert (error, message) == (FetchFailed, "circle.test does not resolve")
    assert dialled == [PUBLIC]


async def test_private_networks_opened_by_the_operator_open_nothing_else(dialled: list[str]) -> None:
    closed = [host for family in ("metadata", "link-local", "unspecified", "multicast and broadcast")
              for host in ADDRESSES[family]]  # fmt: skip
    inside = ["[::ffff:169.254.169.254]", "[::a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::a9fe:a9fe]"]
    inside += ["[::ffff:0:169.254.169.254]", "[2002:a9fe:a9fe::1]"]
    opened = Fetcher(policy(allow_private=True), ssl_context=TRUST_NOBODY)
    for host in (*closed, *inside):
        assert (await refusal(opened, f"http://{host}/"))[0] is FetchDenied, host
    assert dialled == []
    await opened.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_no_proxy_of_the_environment_is_dialled(
    dialled: list[str], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://10.9.8.7:3128")
        monkeypatch.setenv(name.upper(), "http://10.9.8.7:3128")
    answer_from(monkeypatch, {"good.test": [[PUBLIC]]})
    # The server does not speak TLS: that road ends at this limit.
    fetcher = Fetcher(policy(allow_private=False, connect_timeout_s=0.2), ssl_context=TRUST_NOBODY)
    async with serve(response(404)) as server:
        assert (await refusal(fetcher, f"{scheme}://good.test:{server.port}/"))[0] is FetchFailed
        assert all(head.startswith(b"GET / HTTP/1.1\r\n") for head in server.heads)  # no CONNECT, no absolute target
    assert dialled == [PUBLIC]
    await fetcher.close()
