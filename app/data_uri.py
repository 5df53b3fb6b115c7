"""`data:` URI -> bytes: lenient about how the bytes were written down, strict about which bytes they are.

Every step is one pass in C or numpy over the whole payload, so 20 MB cost little more than the base64 decoding itself.
The functions hold no state: call `decode_data_uri` in a thread, never on the event loop.
"""

import binascii

import numpy as np

from app.errors import InvalidRequest, LimitExceeded

EXPECTED = "expected data:[<media type>][;<parameter>...][;base64],<data>"

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
# What a percent-decoded payload may be written with: printable ASCII but "#", where a URL parser would cut.
_PLAIN = bytes(code for code in range(0x20, 0x7F) if code != ord("#"))
# A hexadecimal digit's value by its ASCII code; 255 marks everything else.
_HEX = np.full(256, 255, dtype=np.uint8)
_HEX[list(b"0123456789abcdef")] = range(16)
_HEX[list(b"ABCDEF")] = range(10, 16)
_STEP_BYTES = 1 << 18


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """Decode a `data:` URI (RFC 2397) without ever guessing at its bytes.

    Accepted: any letter case of `data` and `base64`, any parameters, a missing or wrong media type; base64 in the plain
    or the URL-safe alphabet, percent-escaped or not, broken into lines, with or without padding. Without `;base64` the
    percent-decoded bytes.

    Args:
        uri: the whole URI, scheme included.
        max_bytes: the most decoded bytes; checked before decoding.
    Raises:
        InvalidRequest: anything else: no comma, no data, foreign characters, both alphabets mixed, a base64 group that
            was cut (also one whose unused bits are not zero), padding beyond the last group, a broken escape.
        LimitExceeded: more than `max_bytes`.
    """
    comma = uri.find(",")
    header = uri[:comma].lower() if comma >= 0 else ""
    if not header.startswith("data:"):
        raise InvalidRequest(f"not a complete data URI: {EXPECTED}")
    try:
        payload = uri[comma + 1 :].encode("ascii")
    except UnicodeEncodeError:
        raise InvalidRequest(f"data URI has characters outside ASCII: {EXPECTED}") from None

    is_base64 = "base64" in (parameter.strip() for parameter in header.split(";")[1:])
    data = _decode_base64(payload, max_bytes) if is_base64 else _decode_plain(payload, max_bytes)
    if not data:
        raise InvalidRequest(f"data URI has no data after the comma: {EXPECTED}")
    return data


def _decode_base64(payload: bytes, max_bytes: int) -> bytes:
    digits = _join_lines(_unescape(payload))
    body = digits.rstrip(b"=")
    num_padding = len(digits) - len(body)
    if len(body) % 4 == 1:
        raise InvalidRequest(f"data URI's base64 is cut: {len(body)} digits end in a group of one, expected 2 to 4")
    if num_padding > -len(body) % 4:
        raise InvalidRequest(f"data URI's base64 has {num_padding} '=' at its end, expected {-len(body) % 4}")
    _check_size(len(body) * 3 // 4, max_bytes)
    if not body:
        return b""

    if b"-" in body or b"_" in body:
        if b"+" in body or b"/" in body:
            raise InvalidRequest("data URI mixes both base64 alphabets, expected '+' and '/' or '-' and '_'")
        body = body.translate(_URL_SAFE)
    try:
        data = binascii.a2b_base64(body + b"=" * (-len(body) % 4), strict_mode=True)
    except binascii.Error:
        raise InvalidRequest("data URI has characters that are not base64") from None
    # An encoder leaves the last digit's spare bits at zero; others mean that the group went on and was cut.
    spare_bits = {0: 0, 2: 4, 3: 2}[len(body) % 4]
    if _ALPHABET.index(body[-1]) % (1 << spare_bits):
        raise InvalidRequest("data URI's base64 is cut: the last group's unused bits are not zero")
    return data


def _decode_plain(payload: bytes, max_bytes: int) -> bytes:
    if payload.translate(None, _PLAIN):
        raise InvalidRequest("data URI has characters that must be percent-escaped")
    _check_size(len(payload) - 2 * payload.count(b"%"), max_bytes)
    return _unescape(payload)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise LimitExceeded(f"data URI holds {num_bytes} bytes, limit {max_bytes}")


def _unescape(text: bytes) -> bytes:
    """Replace every %XX, once. In numpy, as urllib's loop takes seconds; in steps, to need little memory."""
    if b"%" not in text:
        return text
    pieces = []
    start = 0
    while start < len(text):
        end = start + _STEP_BYTES
        escape = text.rfind(b"%", end - 2, end) if end < len(text) else -1
        if escape >= 0:  # would be cut by the step
            end = escape
        pieces.append(_unescape_step(text[start:end]))
        start = end
    return b"".join(pieces)


def _unescape_step(text: bytes) -> bytes:
    codes = np.frombuffer(text, dtype=np.uint8)
    at = np.flatnonzero(codes == ord("%"))
    if not len(at):
        return text
    if at[-1] + 2 >= len(codes):
        raise InvalidRequest("data URI ends within a percent escape")
    high, low = _HEX[codes[at + 1]], _HEX[codes[at + 2]]
    if ((high | low) == 255).any():
        raise InvalidRequest("data URI has a '%' without two hexadecimal digits")
    decoded = codes.copy()
    decoded[at] = high << 4 | low
    keep = np.ones(len(codes), dtype=bool)
    keep[at + 1] = keep[at + 2] = False
    return decoded[keep].tobytes()


def _join_lines(text: bytes) -> bytes:
    """Drop line breaks wherever they stand, other blanks only around them or between whole groups of four digits.

    A '+' that form decoding turned into a blank falls within groups: dropping it would give other bytes.
    """
    if b" " not in text and b"\t" not in text:
        return text.translate(None, b"\r\n") if b"\n" in text or b"\r" in text else text
    line = b"".join(line.strip(b" \t") for line in text.splitlines())
    pieces = line.replace(b"\t", b" ").split(b" ")
    if any(len(piece) % 4 for piece in pieces[:-1]):
        raise InvalidRequest("data URI has a blank within a base64 group (a '+' that was form-decoded?)")
    return b"".join(pieces)
