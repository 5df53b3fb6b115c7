"""`multipart/form-data` bodies, cut into parts in memory: no upload ever touches the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.errors import InvalidRequest, LimitExceeded

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


@dataclass
class FormPart:
    """One part of a `multipart/form-data` body."""

    name: str
    media_type: str
    is_file: bool
    data: bytes


def split_form(content_type: str, body: bytes, max_parts: int) -> list[FormPart]:
    """Cut a complete multipart body into its parts, in order.

    Raises:
        InvalidRequest: no boundary, or a body that does not keep to it.
        LimitExceeded: more than `max_parts` parts.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidRequest("header Content-Type: multipart/form-data needs a boundary")
    collector = _PartCollector(max_parts)
    preamble = max(body.find(b"--" + boundary), 0)  # what RFC 2046 lets stand before the first part
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.write(body[preamble:] if preamble else body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest("request body is not the multipart/form-data its boundary announces") from error
    if not collector.complete:
        raise InvalidRequest("request body ends in the middle of its multipart/form-data")
    return collector.parts


class _PartCollector:
    """Callbacks of python-multipart's parser; offsets are into the data of each call."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[FormPart] = []
        self.complete = False
        self._max_parts = max_parts
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.parts) >= self._max_parts:
            raise LimitExceeded(f"form: more than {self._max_parts} parts")
        self._headers, self._data = {}, bytearray()
        self._name = self._value = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]

    def _end(self) -> None:
        header = self._headers.get(b"content-disposition", b"")
        _, disposition = parse_options_header(header)
        if b"name" not in disposition:
            raise InvalidRequest(f"form part {len(self.parts) + 1} has no name")
        self.parts.append(
            FormPart(
                name=disposition[b"name"].decode("utf-8", errors="replace"),
                media_type=self._headers.get(b"content-type", b"").decode("latin-1").partition(";")[0],
                # The library passes over the encoded form of a name (RFC 5987), which some clients send alone.
                is_file=b"filename" in disposition or b"filename*=" in header.lower(),
                data=bytes(self._data),
            )
        )

    def _finish(self) -> None:
        self.complete = True
