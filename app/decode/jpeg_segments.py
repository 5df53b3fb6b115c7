"""What a JPEG's markers say of its scans, read without decoding any, and in steps that never hold the GIL for long."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Final

from app.errors import LimitExceeded

_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # the end, and those that have a length
_MAX_SEGMENTS: Final = 10_000
_STEP_BYTES: Final = 4 << 20  # searched in 2 ms
_SCAN_START: Final = 0xDA
_END: Final = 0xD9
_RESTART_INTERVAL: Final = 0xDD
QUANTIZATION: Final = 0xDB
FRAME_STARTS: Final = frozenset({0xC0, 0xC1, 0xC2})  # Huffman coded: baseline, extended, progressive


@dataclass(frozen=True)
class Scan:
    """One pass over the picture.

    Attributes:
        frame: payload of the frame header before it: depth, height, width, and three bytes a component.
        header: payload of its own: components, spectral band, bits.
        restart_interval: units between two restart markers; 0 if there are none.
        data_at: where its image data begins.
    """

    frame: bytes
    header: bytes
    restart_interval: int
    data_at: int

    @property
    def components(self) -> bytes:
        """Identifiers of its components."""
        return self.header[1:-3:2]

    @property
    def is_whole(self) -> bool:
        """Whether its header has the length that it says."""
        return len(self.header) > 0 and len(self.header) == 4 + 2 * self.header[0]

    @property
    def is_without_ac(self) -> bool:
        """Whether it has but the blocks' means (DC), as some scans of a progressive picture."""
        return self.header[-2] == 0

    @property
    def unit_px(self) -> tuple[float, float]:
        """(width, height) in pixels of a unit (MCU) of its image data; a scan of one component has blocks as units."""
        sampling = dict(zip(self.frame[6::3], self.frame[7::3], strict=False))
        most_wide = max(both >> 4 for both in sampling.values())
        most_high = max(both & 15 for both in sampling.values())
        own = sampling.get(self.components[0], 0x11) if len(self.components) == 1 else 0x11
        return 8 * most_wide / (own >> 4), 8 * most_high / (own & 15)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the picture in pixels."""
        return int.from_bytes(self.frame[3:5], "big"), int.from_bytes(self.frame[1:3], "big")

    @property
    def num_units(self) -> tuple[int, int]:
        """Units in a row, and rows of them."""
        return ceil(self.size[0] / self.unit_px[0]), ceil(self.size[1] / self.unit_px[1])


def read_scans(data: bytes) -> list[Scan]:
    """All scans up to the end marker, or to the end of `data`.

    Raises:
        LimitExceeded: more marker segments than any camera or editor writes.
    """
    frame, interval = b"", 0
    scans: list[Scan] = []
    num_segments = 0
    for marker, at, payload in islice(segments(data), _MAX_SEGMENTS):
        num_segments += 1
        if marker in FRAME_STARTS:
            frame = payload
        elif marker == _RESTART_INTERVAL:
            interval = int.from_bytes(payload[:2], "big")
        elif marker == _SCAN_START:
            scans.append(Scan(frame, payload, interval, at))
    if num_segments == _MAX_SEGMENTS:
        raise LimitExceeded(f"JPEG of more than {_MAX_SEGMENTS} segments")
    return scans


def segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(marker, where it ends, payload) of each marker segment before the end; image data between them is skipped."""
    at = 2
    while at < len(data):
        found = _MARKER.search(data, at, at + _STEP_BYTES)
        if found is None:
            at += _STEP_BYTES - 1  # the step may have ended within a marker
            continue
        marker = data[found.end() - 1]
        if marker == _END:
            return
        start = found.end()
        at = start + max(int.from_bytes(data[start : start + 2], "big"), 2)
        yield marker, at, data[start + 2 : at]
