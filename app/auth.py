"""Who a request is from: `Authorization: Bearer` against the keys of `--api-key-file`. docs/security.md."""

import time
from collections.abc import Callable, Iterable
from hmac import compare_digest
from pathlib import Path

from app.errors import Unauthorized
from app.key_file import MAX_KEY_CHARS, Key, Limit, digest_of, load_keys
from app.key_limits import IN_FLIGHT, RATE, Caller
from app.metrics import Metrics
from app.settings import InvalidSettings, Settings

# What probes and people with a problem in their hands ask for; it says nothing about anybody's requests.
OPEN_PATHS = ("/health", "/health/live", "/health/ready")
OPEN_PREFIX = "/problems/"

Headers = Iterable[tuple[bytes, bytes]]  # as ASGI has them: names in small letters


class Keys:
    """The API keys of one service, and what their holders are doing. Used from the event loop only.

    Args:
        path: of the key file; it is read at once.
        defaults: limits of a key whose line says nothing else.
        open_paths: besides those that are always open.
    Raises:
        InvalidKeyFile: no usable file.
    """

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        *,
        defaults: Limit = Limit(),  # noqa: B008 - frozen
        open_paths: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._metrics = metrics
        self._defaults = defaults
        self._open_paths = {*OPEN_PATHS, *open_paths}
        self._clock = clock
        self._callers: dict[str, Caller] = {}
        self._digests: list[tuple[bytes, Caller]] = []
        self.replace(load_keys(path))

    def __len__(self) -> int:
        return len(self._digests)

    def replace(self, keys: Iterable[Key]) -> None:
        """Take these keys from the next request on. Callers that stay keep what they have in flight and their tokens;
        requests of those that go are finished."""
        callers: dict[str, Caller] = {}
        digests = []
        for key in keys:
            limit = key.limit.over(self._defaults)
            caller = self._callers.get(key.name)
            if caller is None:
                caller = Caller(key.name, limit, self._clock, self._refusals(key.name))
                self._metrics.key_requests.labels(key.name)
            else:
                caller.set_limit(limit)
            callers[key.name] = caller
            digests.append((key.digest, caller))
        for name in self._callers.keys() - callers.keys():
            self._metrics.key_requests.remove(name)
            for limit_name in (RATE, IN_FLIGHT):
                self._metrics.key_refusals.remove(name, limit_name)
        self._callers, self._digests = callers, digests

    def _refusals(self, name: str) -> Callable[[str], None]:
        counters = {limit: self._metrics.key_refusals.labels(name, limit) for limit in (RATE, IN_FLIGHT)}
        return lambda limit: counters[limit].inc()

    def identify(self, path: str, headers: Headers) -> Caller | None:
        """Whose request this is; None where the path needs no key.

        Raises:
            Unauthorized: it needs one, and this is none.
        """
        if self.is_open(path):
            return None
        try:
            caller = self._find(_token(headers))
        except Unauthorized as error:
            self._metrics.unauthorized.labels(error.reason).inc()
            raise
        self._metrics.key_requests.labels(caller.name).inc()
        return caller

    def is_open(self, path: str) -> bool:
        """Whether anybody may ask for it."""
        return path in self._open_paths or path.startswith(OPEN_PREFIX)

    def _find(self, token: bytes) -> Caller:
        digest = digest_of(token)
        found: Caller | None = None
        for known, caller in self._digests:  # to the end, so that the time taken says nothing about which it was
            if compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthorized("the API key is not known here", "unknown")
        return found


def _token(headers: Headers) -> bytes:
    """What `Authorization: Bearer` carries."""
    values = [value for name, value in headers if name == b"authorization"]
    if not values:
        raise Unauthorized("header Authorization is missing, expected: Bearer and an API key", "missing")
    scheme, _, token = values[0].strip().partition(b" ")
    token = token.strip()
    if len(values) > 1 or scheme.lower() != b"bearer" or not 0 < len(token) <= MAX_KEY_CHARS:
        raise Unauthorized("header Authorization is not one Bearer and one API key", "malformed")
    return token


def open_keys(settings: Settings, metrics: Metrics) -> Keys | None:
    """The keys that the settings ask for; None where anybody may call.

    Raises:
        InvalidKeyFile: no usable file.
        InvalidSettings: limits per key without keys.
    """
    defaults = Limit(settings.key_requests_per_s, settings.key_burst, settings.key_max_requests)
    if settings.api_key_file is None:
        for name in ("key_requests_per_s", "key_burst", "key_max_requests"):
            if getattr(settings, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidSettings(f"{flag} needs --api-key-file: without keys all are one caller")
        return None
    if defaults.burst and not defaults.requests_per_s:
        raise InvalidSettings("--key-burst needs --key-requests-per-s")
    open_paths = ("/metrics",) if settings.metrics_without_key else ()
    return Keys(settings.api_key_file, metrics, defaults=defaults, open_paths=open_paths)
