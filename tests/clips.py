"""Test films whose frames carry their own number as light and dark blocks, so that a wrong frame is seen."""

import io
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from encoder import Segment

Frame = NDArray[np.uint8]

BITS = 12
COLUMNS = 4  # blocks in a row; three rows


def numbered_frame(number: int, width: int, height: int) -> Frame:
    """(height, width, 3): 4 x 3 blocks, the lowest bit of `number` at the top left; a light block is a one."""
    bits = [(number >> bit) & 1 for bit in range(BITS)]
    board = np.array(bits, dtype=np.uint8).reshape(-1, COLUMNS)
    rows = np.arange(height) * board.shape[0] // height
    columns = np.arange(width) * COLUMNS // width
    light = board[rows][:, columns]
    return np.stack([light * 180 + 40, light * 150 + 60, light * 120 + 30], axis=-1).astype(np.uint8)


def read_number(frame: Frame) -> int:
    """The number a frame carries."""
    height, width = frame.shape[:2]
    num_rows = BITS // COLUMNS
    number = 0
    for bit in range(BITS):
        row, column = divmod(bit, COLUMNS)
        y, x = int((row + 0.5) * height / num_rows), int((column + 0.5) * width / COLUMNS)
        number |= int(frame[y - 1 : y + 2, x - 1 : x + 2].mean() > 128) << bit
    return number


def make_film(
    num_frames: int = 48,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    size: tuple[int, int] = (192, 160),
    fps: int = 24,
    pix_fmt: str = "yuv420p",
    codec_options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    stamps: Sequence[int] | None = None,
    rotation: int = 0,
    frames: Sequence[Frame] | None = None,
) -> bytes:
    """Encode frames 0 to num_frames - 1.

    Args:
        size: (width, height) in pixels, before any rotation.
        stamps: presentation time of each frame in units of 1/(100*fps) s; default evenly spaced.
        rotation: of the display matrix, in degrees.
        frames: pictures instead of the numbered ones.
    """
    width, height = size
    with (
        tempfile.NamedTemporaryFile() as file,  # some muxers read their output again, by its name
        av.open(file.name, "w", format=container, options=container_options or {}) as output,
    ):
        stream: Any = output.add_stream(codec, rate=fps, options=codec_options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.thread_count = 1
        if stamps is not None:
            stream.codec_context.time_base = Fraction(1, 100 * fps)
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = numbered_frame(number, width, height) if frames is None else frames[number]
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number if stamps is None else stamps[number]
            frame.time_base = Fraction(1, fps) if stamps is None else Fraction(1, 100 * fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        output.close()
        return Path(file.name).read_bytes()


def remux(data: bytes, container: str, *, start: int = 0) -> bytes:
    """The same packets in another container, the first `start` frames before time zero: an edit list in MP4."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=container) as output:
        stream: Any = source.streams.video[0]
        copy = output.add_stream_from_template(stream)
        shift = start * int(1 / (stream.average_rate * stream.time_base))
        for packet in source.demux(stream):
            if packet.size:
                packet.stream = copy
                packet.pts -= shift
                packet.dts -= shift
                output.mux(packet)
    return buffer.getvalue()


def change_size(container: str, codec: str) -> bytes:
    """A film of 24 frames of 192x160 pixels, then 24 of 256x192, in one stream."""
    buffer = io.BytesIO()
    parts = [make_film(24, container=container, codec=codec, size=size) for size in ((192, 160), (256, 192))]
    with av.open(io.BytesIO(parts[0])) as first, av.open(buffer, "w", format=container) as output:
        copy = output.add_stream_from_template(first.streams.video[0])
        for offset_ms, part in zip((0, 1000), parts, strict=True):
            with av.open(io.BytesIO(part)) as source:
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.stream = copy
                        packet.pts += offset_ms
                        packet.dts = packet.pts
                        output.mux(packet)
    return buffer.getvalue()


def frames_of(segment: Segment, size: tuple[int, int]) -> Frame:
    """(t, H, W, 3): the frames that a segment was cut from, where nothing was resized.

    Args:
        size: (width, height) of a frame in pixels, before padding.
    """
    t, h, w = segment.grid_thw
    patches = segment.pixel_values.numpy().reshape(t, h, w, 3, 14, 14)
    canvas: Frame = patches.transpose(0, 1, 4, 2, 5, 3).reshape(t, h * 14, w * 14, 3)
    return canvas[:, : size[1], : size[0]]
