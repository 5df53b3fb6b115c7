"""`data:` URI -> bytes: lenient about how the bytes were written down, strict about which bytes they are.

The payload goes through a chain of generators in steps, each one pass in C or numpy: no call holds the GIL for longer
than a few milliseconds, however long the URI, and 20 MB cost little more than the base64 decoding itself.
The functions hold no state: call `decode_data_uri` in a thread, never on the event loop.
"""

import binascii
import io
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pybase64

from app.errors import InvalidRequest, LimitExceeded

EXPECTED: Final = "expected data:[<media type>][;<parameter>...][;base64],<data>"

_STEP_BYTES: Final = 1 << 16
_MAX_HEADER_BYTES: Final = 1 << 16  # a media type and a few parameters
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
# What a percent-decoded payload may be written with: printable ASCII but "#", where a URL parser would cut.
_PLAIN: Final = bytes(code for code in range(0x20, 0x7F) if code != ord("#"))
_BREAKS: Final = b"\r\n"
_BLANKS: Final = b" \t"
# A hexadecimal digit's value by its ASCII code; 255 marks everything else.
_HEX = np.full(256, 255, dtype=np.uint8)
_HEX[list(b"0123456789abcdef")] = range(16)
_HEX[list(b"ABCDEF")] = range(10, 16)


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """Decode a `data:` URI (RFC 2397) without ever guessing at its bytes.

    Accepted: any letter case of `data` and `base64`, any parameters, a missing or wrong media type; base64 in the plain
    or the URL-safe alphabet, percent-escaped or not, broken into lines, with or without padding. Without `;base64` the
    percent-decoded bytes.

    Args:
        uri: the whole URI, scheme included.
        max_bytes: the most decoded bytes; no more are held.
    Raises:
        InvalidRequest: anything else: no comma, no data, foreign characters, both alphabets mixed, a base64 group that
            was cut (also one whose unused bits are not zero), padding beyond the last group, a broken escape.
        LimitExceeded: more than `max_bytes`.
    """
    comma = uri.find(",", 0, _MAX_HEADER_BYTES)
    header = uri[:comma].lower() if comma >= 0 else ""
    if not header.startswith("data:"):
        raise InvalidRequest(f"not a complete data URI: {EXPECTED}")
    is_base64 = "base64" in (parameter.strip() for parameter in header.split(";")[1:])
    steps = _steps(uri, comma + 1)
    data = _decode_base64(steps, max_bytes) if is_base64 else _decode_plain(steps, max_bytes)
    if not data:
        raise InvalidRequest(f"data URI has no data after the comma: {EXPECTED}")
    return data


def _steps(uri: str, start: int) -> Iterator[bytes]:
    for at in range(start, len(uri), _STEP_BYTES):
        try:
            yield uri[at : at + _STEP_BYTES].encode("ascii")
        except UnicodeEncodeError:
            raise InvalidRequest(f"data URI has characters outside ASCII: {EXPECTED}") from None


def _decode_base64(steps: Iterable[bytes], max_bytes: int) -> bytes:
    data = _Bounded(max_bytes)
    alphabets: set[bool] = set()  # whether a digit of the URL-safe alphabet came, and of the plain one
    group = b""  # the digits of a group that the next step will complete
    num_digits = num_padding = 0
    for step in _join_lines(_unescape(steps)):
        digits = step.rstrip(b"=")
        if b"=" in digits or (digits and num_padding):
            raise InvalidRequest("data URI has characters that are not base64")
        num_digits += len(digits)
        num_padding += len(step) - len(digits)
        alphabets |= _alphabets(digits)
        if len(alphabets) > 1:
            raise InvalidRequest("data URI mixes both base64 alphabets, expected '+' and '/' or '-' and '_'")
        digits = group + (digits.translate(_URL_SAFE) if True in alphabets else digits)
        whole = len(digits) // 4 * 4
        data.add(_groups(digits[:whole]))
        group = digits[whole:]
    if len(group) == 1:
        raise InvalidRequest(f"data URI's base64 is cut: {num_digits} digits end in a group of one, expected 2 to 4")
    if num_padding > -num_digits % 4:
        raise InvalidRequest(f"data URI's base64 has {num_padding} '=' at its end, expected {-num_digits % 4}")
    if group:
        data.add(_groups(group + b"=" * (4 - len(group))))
        # An encoder leaves the last digit's spare bits at zero; others mean that the group went on and was cut.
        if _ALPHABET.index(group[-1]) % (16 if len(group) == 2 else 4):
            raise InvalidRequest("data URI's base64 is cut: the last group's unused bits are not zero")
    return data.whole()


def _alphabets(digits: bytes) -> set[bool]:
    """Of the digits that tell: True if there are URL-safe ones, False if there are plain ones."""
    url_safe = {True} if b"-" in digits or b"_" in digits else set()
    return url_safe | ({False} if b"+" in digits or b"/" in digits else set())


def _groups(digits: bytes) -> bytes:
    """Decode whole groups of four."""
    try:
        return pybase64.b64decode(digits, validate=True)
    except binascii.Error:
        raise InvalidRequest("data URI has characters that are not base64") from None


def _decode_plain(steps: Iterable[bytes], max_bytes: int) -> bytes:
    data = _Bounded(max_bytes)
    for step in _unescape(_checked(steps)):
        data.add(step)
    return data.whole()


def _checked(steps: Iterable[bytes]) -> Iterator[bytes]:
    for step in steps:
        if step.translate(None, _PLAIN):
            raise InvalidRequest("data URI has characters that must be percent-escaped")
        yield step


class _Bounded:
    """Bytes that grow in place up to a limit; what goes beyond is only counted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file = io.BytesIO()

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= self._max_bytes:
            self._file.write(data)

    def whole(self) -> bytes:
        """All of it, not copied."""
        if self._num_bytes > self._max_bytes:
            raise LimitExceeded(f"data URI holds {self._num_bytes} bytes, limit {self._max_bytes}")
        return self._file.getvalue()


def _unescape(steps: Iterable[bytes]) -> Iterator[bytes]:
    """Replace every %XX, once. In numpy, as urllib's loop takes seconds."""
    rest = b""
    for step in steps:
        text = rest + step
        escape = text.rfind(b"%", max(len(text) - 2, 0))
        rest = text[escape:] if escape >= 0 else b""  # would be cut by the step
        yield _unescape_step(text[: len(text) - len(rest)])
    if rest:
        raise InvalidRequest("data URI ends within a percent escape")


def _unescape_step(text: bytes) -> bytes:
    if b"%" not in text:
        return text
    codes = np.frombuffer(text, dtype=np.uint8)
    at = np.flatnonzero(codes == ord("%"))
    if at[-1] + 2 >= len(codes):
        raise InvalidRequest("data URI has a '%' without two hexadecimal digits")
    high, low = _HEX[codes[at + 1]], _HEX[codes[at + 2]]
    if ((high | low) == 255).any():
        raise InvalidRequest("data URI has a '%' without two hexadecimal digits")
    decoded = codes.copy()
    decoded[at] = high << 4 | low
    keep = np.ones(len(codes), dtype=bool)
    keep[at + 1] = keep[at + 2] = False
    return decoded[keep].tobytes()


def _join_lines(steps: Iterable[bytes]) -> Iterator[bytes]:
    """Drop line breaks wherever they stand, other blanks only around them or between whole groups of four digits.

    A '+' that form decoding turned into a blank falls within groups: dropping it would give other bytes.
    """
    num_digits = 0
    gap = b""  # what ended the step before: a gap is judged once it is whole
    for step in steps:
        text = gap + step
        body = text.rstrip(_BREAKS + _BLANKS)
        tail = text[len(body) :]
        gap = b"\n" if b"\n" in tail or b"\r" in tail else tail[:1]
        if b" " in body or b"\t" in body:
            _check_gaps(body, num_digits)
        digits = body.translate(None, _BREAKS + _BLANKS)
        num_digits += len(digits)
        yield digits


def _check_gaps(text: bytes, num_digits: int) -> None:
    """Refuse a gap without a line break within a group; `num_digits` stand before the text."""
    codes = np.frombuffer(text, dtype=np.uint8)
    is_break = (codes == ord("\n")) | (codes == ord("\r"))
    is_gap = is_break | (codes == ord(" ")) | (codes == ord("\t"))
    starts = np.flatnonzero(is_gap & ~np.concatenate(([False], is_gap[:-1])))
    has_break = np.logical_or.reduceat(is_break, starts)
    digits_before = num_digits + starts - np.cumsum(is_gap)[starts] + 1
    if (~has_break & (digits_before % 4 != 0)).any():
        raise InvalidRequest("data URI has a blank within a base64 group (a '+' that was form-decoded?)")
