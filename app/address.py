"""Which addresses may be dialled, and the network backend that dials exactly those."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpcore

from app.errors import FetchDenied, FetchFailed

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port -> the addresses to check and dial, in the order of preference."""

NAT64 = ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ip_network("2000::/3")

# Closed under every policy: never a media server, and link-local is where clouds keep their credentials.
NEVER = (
    *ip_network("::/96").address_exclude(ip_network("::1/128")),  # type: ignore[arg-type]  # IPv4 as it once was written
    *map(
        ip_network,
        (
            "0.0.0.0/8",  # "this host": Linux dials loopback
            "100.100.100.200/32",  # metadata, Alibaba Cloud
            "168.63.129.16/32",  # metadata and agent, Azure: a public address by the registry
            "169.254.0.0/16",  # link-local: metadata, AWS, Azure, Google Cloud and others
            "192.0.0.192/32",  # metadata, Oracle Cloud
            "224.0.0.0/4",  # multicast
            "255.255.255.255/32",
            "::ffff:0:0:0/96",  # IPv4 translated by the network, to wherever it likes
            "64:ff9b:1::/48",
            "2001::/32",  # Teredo and 6to4 carry an IPv4 address to a relay
            "2002::/16",
            "fd00:42::/32",  # metadata, Scaleway
            "fd00:c1::/32",  # metadata, Oracle Cloud
            "fd00:ec2::/32",  # metadata, AWS
            "fd20:ce::254/128",  # metadata, Google Cloud
            "fe80::/10",  # link-local
            "ff00::/8",  # multicast
        ),
    ),
)

# Beyond what `ipaddress` of every supported Python calls not global (IANA special-purpose registries).
NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # 6to4 relays
            "2001::/23",  # protocol assignments
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)


def is_allowed(address: str, *, allow_private: bool) -> bool:
    """Whether an address, as the resolver gave it, may be dialled.

    IPv4 inside IPv6 (mapped, NAT64) is judged as the IPv4 address it leads to. `allow_private` opens loopback, private,
    shared and other special ranges, but nothing of NEVER.
    """
    ip = _unwrap(ip_address(address))
    if any(ip in network for network in NEVER):
        return False
    if allow_private:
        return True
    if isinstance(ip, IPv6Address) and ip not in GLOBAL_UNICAST:
        return False
    return ip.is_global and not any(ip in network for network in NOT_PUBLIC)


def _unwrap(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if isinstance(ip, IPv6Address):
        if ip.ipv4_mapped:
            return ip.ipv4_mapped
        if ip in NAT64:
            return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip


class SystemResolver:
    """`getaddrinfo` on threads of its own: a name server that stalls must not hold the loop's shared executor."""

    def __init__(self, num_threads: int = 16) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        return [str(sockaddr[0]) for *_, sockaddr in found]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Dialler(httpcore.AsyncNetworkBackend):
    """Connects one request: resolves once, checks every address, dials only what it checked.

    httpcore keeps the name for the Host header, for SNI and for the certificate. `aclose` closes the socket in whatever
    state it is, also one whose TLS handshake was cancelled.
    """

    def __init__(self, resolve: Resolve, *, label: str, allow_private: bool, timeout_s: float) -> None:
        self._resolve = resolve
        self._label = label
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._backend = httpcore.AnyIOBackend()
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature; `timeout_s` covers resolving as well
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check and connect within `timeout_s`.

        Raises:
            FetchDenied: one of the name's addresses is not allowed; none was dialled.
            FetchFailed: the name does not resolve, or no address answers in time.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        addresses = await self._checked_addresses(host, port)
        for index, address in enumerate(addresses):
            share_s = (deadline - asyncio.get_running_loop().time()) / (len(addresses) - index)
            try:
                self._stream = await self._backend.connect_tcp(address, port, share_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
            return self._stream
        raise FetchFailed(f"{self._label} accepts no connection (limit {self._timeout_s:g} s)")

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def _checked_addresses(self, host: str, port: int) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                addresses = list(dict.fromkeys(await self._resolve(host, port)))
        except TimeoutError as error:
            raise FetchFailed(f"{self._label} does not resolve within {self._timeout_s:g} s") from error
        except (OSError, UnicodeError) as error:
            raise FetchFailed(f"{self._label} does not resolve") from error
        if not addresses:
            raise FetchFailed(f"{self._label} does not resolve")
        if not all(is_allowed(address, allow_private=self._allow_private) for address in addresses):
            raise FetchDenied(f"{self._label} is not at a public address")
        return addresses
