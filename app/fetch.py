"""Media URL -> bytes, within limits on host, address, redirects, size and time, and on all that is held together.

httpcore, the connection layer of httpx, is used directly: it takes the request's target as bytes, so that no second
parser reads the URL, and a network backend of our own, so that the address checked is the address dialled. Every hop
has a connection of its own: its address was checked for this fetch, it cannot go stale between two fetches, and bytes
left over from one answer cannot become another's.
"""

import asyncio
import contextlib
import io
import ssl
from contextlib import AbstractContextManager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import httpcore
import httpx

from app.address import Dialler, Resolve, SystemResolver
from app.budget import ByteBudget, Hold
from app.errors import FetchDenied, FetchFailed, InvalidRequest, LimitExceeded
from app.url import MediaUrl, normalize_host, parse_url
from encoder.errors import SetupError

REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, kw_only=True)
class FetchPolicy:
    """What may be fetched, and how much of it.

    allowed_domains: exact host names, at every hop; None for any.
    allow_private: dial loopback, private and shared addresses too (`app.address.NEVER` stays closed).
    max_bytes: of one body. max_held_bytes: of all bodies, from their first byte until their `hold` ends.
    connect_timeout_s: resolving and TCP, then once more TLS; idle_timeout_s: between two reads; total_timeout_s: one
    fetch with its redirects and with waiting for a connection slot.
    """

    max_bytes: int
    max_held_bytes: int = 2 << 30
    allowed_domains: frozenset[str] | None = None
    allow_private: bool = False
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 10.0
    total_timeout_s: float = 30.0
    max_redirects: int = 3
    max_connections: int = 128
    max_connections_per_host: int = 32


class Fetcher:
    """Fetches media; no more connections at a time than the policy says, in all and to one host."""

    def __init__(
        self, policy: FetchPolicy, resolve: Resolve | None = None, *, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        """
        Args:
            policy: limits; its domains are normalised here.
            resolve: host and port -> addresses; the system's resolver unless given.
            ssl_context: trust for https; certifi's roots (or SSL_CERT_FILE, SSL_CERT_DIR) unless given.
        Raises:
            SetupError: an allowed domain is no host name.
        """
        self._policy = policy
        self._allowed = _normalize_domains(policy.allowed_domains)
        self._system_resolver = SystemResolver()
        self._resolve = resolve or self._system_resolver
        self._ssl_context = ssl_context or httpx.create_ssl_context()
        self._budget = ByteBudget(policy.max_held_bytes, "fetched media")
        self._slots = asyncio.Semaphore(policy.max_connections)
        # A host's own slots live as long as some fetch holds or awaits one.
        self._host_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def close(self) -> None:
        """Release the resolver's threads; fetches still running end on their own."""
        self._system_resolver.close()

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are being fetched or still held."""
        return self._budget.held_bytes

    def hold(self) -> AbstractContextManager[Hold]:
        """A block at whose end a fetched body is done with, and its bytes no longer count."""
        return self._budget.hold()

    async def fetch(self, url: str, hold: Hold | None = None) -> bytes:
        """The body behind an http or https URL: at least one byte, at most `max_bytes`.

        Args:
            hold: counts the body until its block ends; without one, until this call does.
        Raises:
            InvalidRequest: the URL's form.
            FetchDenied: its scheme, host or address, at any hop.
            FetchFailed: an answer that is no media: another status than 2xx, a content encoding, no body, broken HTTP
                or TLS, too many redirects, a time limit.
            LimitExceeded: more than `max_bytes`.
            Overloaded: more than `max_held_bytes` together with all others.
        """
        if hold is None:
            with self.hold() as own:
                return await self.fetch(url, own)
        hop = parse_url(url)
        try:
            async with asyncio.timeout(self._policy.total_timeout_s):
                return await self._follow(hop, hold)
        except TimeoutError as error:
            limit_s = self._policy.total_timeout_s
            raise FetchFailed(f"media from {hop.label} did not arrive within {limit_s:g} s") from error

    async def _follow(self, url: MediaUrl, hold: Hold) -> bytes:
        hop = url
        for _ in range(self._policy.max_redirects + 1):
            if self._allowed is not None and hop.host not in self._allowed:
                raise FetchDenied(f"{hop.label} is not among the allowed media domains")
            answer = await self._get(hop, hold)
            if isinstance(answer, bytes):
                return answer
            hop = answer
        raise FetchFailed(f"{url.label} redirects more than {self._policy.max_redirects} times")

    async def _get(self, url: MediaUrl, hold: Hold) -> bytes | MediaUrl:
        """One hop: the body, or where a redirect leads. The one place that knows httpcore's exceptions."""
        host_slots = self._host_slots.setdefault(url.host, asyncio.Semaphore(self._policy.max_connections_per_host))
        dialler = Dialler(
            self._resolve,
            label=url.label,
            allow_private=self._policy.allow_private,
            timeout_s=self._policy.connect_timeout_s,
        )
        async with host_slots, self._slots, contextlib.aclosing(dialler):
            try:
                return await self._exchange(url, dialler, hold)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:  # TCP is the dialler's: this is TLS
                raise FetchFailed(f"{url.label} offers no trusted TLS connection") from error
            except httpcore.TimeoutException as error:
                raise FetchFailed(f"{url.label} was silent for {self._policy.idle_timeout_s:g} s") from error
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
                raise FetchFailed(f"{url.label} broke off or did not answer in HTTP") from error

    async def _exchange(self, url: MediaUrl, dialler: Dialler, hold: Hold) -> bytes | MediaUrl:
        scheme, host, target = url.scheme.encode(), url.host.encode(), url.target.encode()
        connection = httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme, host, url.port), ssl_context=self._ssl_context, network_backend=dialler
        )
        request = httpcore.Request(
            "GET",
            httpcore.URL(scheme=scheme, host=host, port=url.port, target=target),
            headers=[
                ("Host", url.authority),
                ("User-Agent", "moonvit-serve"),
                ("Accept", "*/*"),
                ("Accept-Encoding", "identity"),
                ("Connection", "close"),
            ],
            extensions={
                "timeout": {
                    "connect": self._policy.connect_timeout_s,
                    "read": self._policy.idle_timeout_s,
                    "write": self._policy.idle_timeout_s,
                }
            },
        )
        response = await connection.handle_async_request(request)
        headers = {name.lower(): value.strip() for name, value in response.headers}
        if response.status in REDIRECTS:
            return url.follow(_location(url, response.status, headers))
        # 206 was not asked for: a part of a picture is another picture.
        if not 200 <= response.status < 300 or response.status == 206:
            raise FetchFailed(f"{url.label} answered {response.status}")
        if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            raise FetchFailed(f"{url.label} answered with a content encoding, expected identity")
        return await self._read(url, response, int(headers.get(b"content-length", 0)), hold)

    async def _read(self, url: MediaUrl, response: httpcore.Response, announced_bytes: int, hold: Hold) -> bytes:
        limit = self._policy.max_bytes
        if announced_bytes > limit:
            raise LimitExceeded(f"media from {url.label} has {announced_bytes} bytes, limit {limit}")
        hold.check(announced_bytes)
        body = io.BytesIO()  # its value is handed over without a copy
        async with contextlib.aclosing(response):
            async for chunk in response.aiter_stream():
                if body.tell() + len(chunk) > limit:
                    raise LimitExceeded(f"media from {url.label} has more than {limit} bytes")
                hold.take(len(chunk))
                body.write(chunk)
        if not body.tell():
            raise FetchFailed(f"{url.label} answered {response.status} without a body")
        return body.getvalue()


def _location(url: MediaUrl, status: int, headers: dict[bytes, bytes]) -> str:
    try:
        return headers[b"location"].decode()
    except (KeyError, UnicodeDecodeError) as error:
        raise FetchFailed(f"{url.label} answered {status} without a usable Location") from error


def _normalize_domains(domains: frozenset[str] | None) -> frozenset[str] | None:
    if domains is None:
        return None
    try:
        return frozenset(map(normalize_host, domains))
    except InvalidRequest as error:
        raise SetupError(f"allowed media domains: expected bare host names, got {sorted(domains)}") from error
