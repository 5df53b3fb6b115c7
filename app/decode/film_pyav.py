"""Frames through PyAV: every frame is decoded in order and only the wanted ones become RGB. Right on all valid films.

Of a damaged film only true frames come out: none that the decoder marks as damaged, and after a packet that does not
decode none until the next key frame, since they lean on what is missing.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, Final

import av.filter
import numpy as np
from numpy.typing import NDArray

from app.decode.film_facts import FilmHeader
from app.decode.film_open import decode, opened, packets
from app.errors import UnsupportedMedia

_NUM_THREADS: Final = 2
_ANY_TIME_BASE: Final = Fraction(1, 1000)  # the conversion looks at pixels only


def frames(
    path: str, header: FilmHeader, indices: Sequence[int], max_pixels: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(index, (H, W, 3) RGB as displayed) of each wanted frame that decodes, one at a time.

    Args:
        indices: ascending positions in the film.
    Raises:
        UnsupportedMedia: a wanted frame of another size than the first.
    """
    wanted = set(indices)
    to_rgb = _ToRgb()
    for index, frame in _numbered(path, header, max_pixels):
        if index not in wanted:
            continue
        if (frame.width, frame.height) != (header.width, header.height):
            sizes = f"{header.width}x{header.height} to {frame.width}x{frame.height}"
            raise UnsupportedMedia(f"film whose frames change their size from {sizes} pixels")
        yield index, np.ascontiguousarray(np.rot90(to_rgb(frame), header.rotation // 90))
        wanted.remove(index)
        if not wanted:
            return


def _numbered(path: str, header: FilmHeader, max_pixels: int) -> Iterator[tuple[int, Any]]:
    """(index, frame) of every true frame; untrue ones count where only counting gives the index."""
    for count, (frame, is_true) in enumerate(_decoded(path, max_pixels)):
        index = count if header.index_of_stamp is None else header.index_of_stamp.get(frame.pts)
        if is_true and index is not None:
            yield index, frame


def _decoded(path: str, max_pixels: int) -> Iterator[tuple[Any, bool]]:
    """(frame, whether it is true) of everything that comes out."""
    with opened(path, max_pixels) as (container, stream):
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = _NUM_THREADS
        whole = True
        for packet in chain(packets(container, stream), [None]):
            if packet is not None and not packet.size:
                continue
            found = None if packet is not None and packet.is_corrupt else decode(stream, packet)
            if found is None:
                whole = False
            for frame in found or []:
                whole = whole or frame.key_frame
                yield frame, whole and not frame.is_corrupt


class _ToRgb:
    """RGB bit for bit as decord makes it, by the same filter; PyAV's own conversion differs for 10-bit films."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._input: tuple[int, int, str] | None = None

    def __call__(self, frame: Any) -> NDArray[np.uint8]:
        """(H, W, 3), before the turn."""
        if self._input != (frame.width, frame.height, frame.format.name):
            self._input = (frame.width, frame.height, frame.format.name)
            self._graph = self._build(frame)
        self._graph.push(frame)
        pixels: NDArray[np.uint8] = self._graph.pull().to_ndarray()
        return pixels

    @staticmethod
    def _build(frame: Any) -> Any:
        graph = av.filter.Graph()
        graph.threads = 1
        source = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format.name, time_base=_ANY_TIME_BASE
        )
        convert = graph.add("format", "rgb24")
        sink = graph.add("buffersink")
        source.link_to(convert)
        convert.link_to(sink)
        graph.configure()
        return graph
