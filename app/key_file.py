"""The file of API keys: a line per caller -> its name, the digest of its key, and what it may do. docs/security.md."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import structlog

from encoder import SetupError

logger = structlog.get_logger("moonvit.keys")

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 1000  # every request is compared with all of them: about 0.3 ms at most
MAX_FILE_BYTES = 1024 * 1024
HASHED = "sha256:"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what `Authorization: Bearer` can carry (RFC 6750)


class InvalidKeyFile(SetupError):
    """The key file cannot be read or has a wrong line. Says which line, never what is in it."""


@dataclass(frozen=True)
class Limit:
    """What one caller may do; None is without a limit.

    Attributes:
        requests_per_s: on average.
        burst: requests at once, after a while without any.
        max_requests: in flight at a time.
    """

    requests_per_s: float | None = None
    burst: int | None = None
    max_requests: int | None = None

    def over(self, defaults: "Limit") -> "Limit":
        """The same, with the defaults where this one says nothing. A rate of its own does not take their burst."""
        return Limit(
            self.requests_per_s or defaults.requests_per_s,
            self.burst or (None if self.requests_per_s else defaults.burst),
            self.max_requests or defaults.max_requests,
        )


@dataclass(frozen=True)
class Key:
    """One line of the file. The key itself is not kept."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256; keys are long and random, so a salt would add nothing
    limit: Limit = Limit()


def load_keys(path: Path) -> tuple[Key, ...]:
    """Read the file.

    Raises:
        InvalidKeyFile: it cannot be read, or is not what docs/security.md says.
    """
    try:
        # A pipe that nobody writes to is empty, instead of holding up this reload and every later one.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            is_public = path.stat().st_mode & 0o004
    except OSError as error:
        raise InvalidKeyFile(f"key file {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidKeyFile(f"key file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        keys = parse_keys(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidKeyFile(f"key file {path} is no UTF-8 text") from error
    except InvalidKeyFile as error:
        raise InvalidKeyFile(f"key file {path}: {error}") from None  # the cause may hold the line
    if is_public:
        logger.warning("every user of this machine can read the key file: chmod o-r", file=str(path))
    return keys


def parse_keys(text: str) -> tuple[Key, ...]:
    """The keys of a file's text.

    Raises:
        InvalidKeyFile: no key, too many, one twice, or a wrong line; every wrong line is named.
    """
    keys: list[Key] = []
    wrong: list[str] = []
    line_of: dict[str | bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = _key(words, number)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            continue
        for what, value in (("name", key.name), ("key", key.digest)):
            if value in line_of:
                wrong.append(f"line {number}: the same {what} as in line {line_of[value]}")
            line_of.setdefault(value, number)
        keys.append(key)
    if wrong:
        rest = f" and {len(wrong) - 5} more lines" if len(wrong) > 5 else ""
        raise InvalidKeyFile("; ".join(wrong[:5]) + rest)
    if not keys:
        raise InvalidKeyFile("it has no key; without --api-key-file nobody needs one")
    if len(keys) > MAX_KEYS:
        raise InvalidKeyFile(f"{len(keys)} keys, limit {MAX_KEYS}")
    return tuple(keys)


def _key(words: list[str], number: int) -> Key:
    first, *options = words
    name, colon, key = first.partition(":")
    if not colon or name == HASHED[:-1]:
        name, key = f"line-{number}", first
    elif not _NAME.fullmatch(name):
        raise ValueError("the name before the colon may have 1 to 64 letters, digits, '.', '_' and '-'")
    limit = Limit()
    for option in options:
        limit = _with(limit, option)
    if limit.burst and not limit.requests_per_s:
        raise ValueError("burst needs requests_per_s beside it")
    return Key(name, _digest(key), limit)


def _digest(key: str) -> bytes:
    if key.startswith(HASHED):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", key.removeprefix(HASHED)):
            raise ValueError(f"{HASHED} is followed by the 64 hex digits of the key's SHA-256")
        return bytes.fromhex(key.removeprefix(HASHED))
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
        raise ValueError(f"the key has {len(key)} characters, allowed: {MIN_KEY_CHARS} to {MAX_KEY_CHARS}")
    if not KEY.fullmatch(key):
        raise ValueError("the key may have letters, digits and . _ ~ + / - only, with = at its end")
    return digest_of(key.encode())


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


def _with(limit: Limit, option: str) -> Limit:
    name, _, value = option.partition("=")
    read: Callable[[str], float] | None = {"requests_per_s": float, "burst": int, "max_requests": int}.get(name)
    if read is None:
        # Not quoted: what stands here may be a key with a blank in it.
        raise ValueError("after the key only requests_per_s=, burst= and max_requests= may follow")
    try:
        number = read(value)
    except ValueError:
        number = 0
    if not 0 < number <= 1_000_000:
        raise ValueError(f"{name} must be a number above 0 and at most 1000000")
    match name:
        case "requests_per_s":
            return replace(limit, requests_per_s=number)
        case "burst":
            return replace(limit, burst=int(number))
    return replace(limit, max_requests=int(number))
