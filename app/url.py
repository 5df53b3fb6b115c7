"""Media URL -> the parts a request is built from. One parser: what it checks is what gets sent."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote

import idna

from app.errors import FetchDenied, FetchFailed, InvalidRequest

MAX_URL_CHARS = 16_384  # signed URLs reach a few thousand
DEFAULT_PORTS = {"http": 80, "https": 443}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")
_AFTER_SCHEME = re.compile(r"//([^/?#]*)([^#]*)")
_HOST_AND_PORT = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::([0-9]{0,5}))?")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_MAX_NAME_CHARS = 253  # RFC 1035
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F))


@dataclass(frozen=True)
class MediaUrl:
    """An absolute http or https URL, taken apart.

    host: lower-case ASCII name without a final dot, or an address without brackets.
    target: path and query exactly as written, but for blanks and non-ASCII characters, which are percent-escaped.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Host and port as the Host header wants them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def label(self) -> str:
        """What messages may say about this URL: the host's name, never an address."""
        return "the media host" if ":" in self.host or _NUMERIC.fullmatch(self.host) else self.host

    def follow(self, location: str) -> "MediaUrl":
        """The URL that a Location header names, absolute or relative to this one.

        Raises:
            FetchDenied: another scheme than http and https, or a step from https to http.
            FetchFailed: no usable URL.
        """
        try:
            url = parse_url(self._absolute(location))
        except InvalidRequest as error:
            raise FetchFailed(f"{self.label} redirects to something that is no usable URL") from error
        if (self.scheme, url.scheme) == ("https", "http"):
            raise FetchDenied(f"{self.label} redirects from https to http")
        return url

    def _absolute(self, location: str) -> str:
        origin = f"{self.scheme}://{self.authority}"
        path = self.target.partition("?")[0]
        if _SCHEME.match(location):
            return location
        if location.startswith("//"):
            return f"{self.scheme}:{location}"
        if location.startswith("/"):
            return origin + location
        if location.startswith(("?", "#")) or not location:
            return origin + path + location
        relative = re.match(r"[^?#]*", location)
        cut = relative.end() if relative else 0
        return origin + _merge(path, location[:cut]) + location[cut:]


def _merge(path: str, relative: str) -> str:
    """RFC 3986 5.2.3 and 5.2.4: `relative` in the folder of `path`, without dot segments."""
    segments = (path.rpartition("/")[0] + "/" + relative).split("/")[1:]
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def parse_url(url: str) -> MediaUrl:
    """Take an http or https URL apart; drop its fragment.

    Raises:
        FetchDenied: another scheme, or an IPv6 zone.
        InvalidRequest: no scheme, no host, a host or port that cannot be, user information, a backslash or a control
            character anywhere, more than MAX_URL_CHARS.
    """
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequest(f"URL has {len(url)} characters, limit {MAX_URL_CHARS}")
    match = _SCHEME.match(url)
    if not match:
        raise InvalidRequest("URL has no scheme: expected https://, http:// or data:")
    scheme = match[1].lower()
    if scheme not in DEFAULT_PORTS:
        raise FetchDenied(f"URL scheme {scheme[:20]!r} is not fetched: expected https or http")
    if _FORBIDDEN.search(url):
        raise InvalidRequest("URL has a backslash or a control character: expected them percent-escaped")
    parts = _AFTER_SCHEME.match(url, match.end())
    if not parts:
        raise InvalidRequest(f"URL has no host: expected {scheme}://<host>")
    authority, target = parts.groups()
    if "@" in authority:
        raise InvalidRequest("URL has user information before its host: expected none")
    host_and_port = _HOST_AND_PORT.fullmatch(authority)
    if not host_and_port:
        raise InvalidRequest("URL has no readable host and port")
    address, name, port = host_and_port.groups()
    return MediaUrl(
        scheme=scheme,
        host=normalize_host(name) if address is None else _normalize_ipv6(address),
        port=_parse_port(port, DEFAULT_PORTS[scheme]),
        target=_escape(target if target.startswith("/") else "/" + target),
    )


def normalize_host(name: str) -> str:
    """The one spelling of a host name or IPv4 address: lower case, IDNA, no final dot.

    Numeric notations (`127.1`, `0x7f000001`) stay as they are: the resolver reads them, and its answer is checked.

    Raises:
        InvalidRequest: not a host name.
    """
    if not name.isascii() and len(name) <= _MAX_NAME_CHARS:
        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except UnicodeError as error:
            raise InvalidRequest("URL's host is not a valid international name") from error
    name = name.lower().removesuffix(".")
    if len(name) > _MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise InvalidRequest("URL's host is empty or not a host name")
    return name


def _normalize_ipv6(text: str) -> str:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError as error:
        raise InvalidRequest("URL's host is not an IPv6 address") from error
    if address.scope_id is not None:
        raise FetchDenied("URL's host is an address with a zone, which is never public")
    return address.compressed


def _parse_port(text: str | None, default: int) -> int:
    port = int(text) if text else default
    if not 1 <= port <= 65_535:
        raise InvalidRequest(f"URL's port is {port}: expected 1 to 65535")
    return port


def _escape(target: str) -> str:
    try:
        return quote(target, safe=_PRINTABLE)
    except UnicodeEncodeError as error:
        raise InvalidRequest("URL is not valid Unicode") from error
