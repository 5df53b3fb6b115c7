"""`Picture`: a decoded picture, or one chunk of frames, whose resize, transparency and patches are left for later.

It is bytes and a few scalars, so that a process that decodes can send it to the one that owns the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from encoder.config import EncoderConfig
from encoder.errors import InvalidSegment
from encoder.grid import Grid, ResizePlan, plan_frames, plan_image
from encoder.resample import ALPHA, INKS, PREMULTIPLIED

CHANNELS: Final = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}
"""Modes, by Pillow's names, that need nothing of Pillow after they are decoded: bytes of a pixel."""

OPAQUE_MODES: Final = ("L", "RGB")  # the only ones where the model has no background for transparent pictures

MAX_SIDE_PX: Final = 32_768  # bounds the weights of an axis; AVIF and WebP files have smaller sides, JPEG twice that
MAX_FRAME_BYTES: Final = 1 << 30  # kernels count the bytes of a frame in int32
FACTS: Final = frozenset({"mode", "width", "height", "num_frames", "is_film", "is_resized"})
"""Keys of `Picture.facts`. Width and height are those of the file; `is_resized`: the pixels have the new size."""


@dataclass(frozen=True, eq=False)
class Picture:
    """Made by `defer_image`, `defer_frames` and `from_facts`, which check what is said here.

    Attributes:
        pixels: uint8 (t, H, W, C), contiguous; H and W are those of the file, or of `plan` if resized already.
        mode: a key of `CHANNELS`. Frames of a film are RGB.
        width, height: of the file, in pixels; they alone decide the plan.
        is_film: the limits of frames apply, not those of pictures.
    """

    pixels: NDArray[np.uint8]
    mode: str
    width: int
    height: int
    is_film: bool
    plan: ResizePlan

    @property
    def grid(self) -> Grid:
        return self.plan.grid(len(self.pixels))

    @property
    def needs_resize(self) -> bool:
        return self.pixels.shape[1:3] != (self.plan.height, self.plan.width)

    @property
    def mixing(self) -> int:
        """Which of `resample.mixing_tables` makes RGB of its channels after the resize; 0 for none."""
        if self.mode == "CMYK":
            return INKS
        if self.mode in OPAQUE_MODES:
            return 0
        return PREMULTIPLIED if self.needs_resize else ALPHA

    def facts(self) -> dict[str, str | int | bool]:
        """What must go along with the bytes of `pixels`; plain values that any format of messages can hold."""
        return {
            "mode": self.mode,
            "width": self.width,
            "height": self.height,
            "num_frames": len(self.pixels),
            "is_film": self.is_film,
            "is_resized": self.pixels.shape[1:3] != (self.height, self.width),
        }

    @classmethod
    def from_facts(
        cls, facts: Mapping[str, Any], data: bytes | bytearray | memoryview, config: EncoderConfig
    ) -> "Picture":
        """The picture that `facts` and the bytes of its `pixels` describe. The bytes are not copied.

        Nothing of the sender is trusted: sizes after the resize are computed here.

        Raises:
            InvalidSegment: facts that are missing, of another type or beyond a limit, or another number of bytes.
        """
        mode, width, height, num_frames = _checked(facts, config)
        plan = (
            plan_frames(width, height, num_frames, config.media)
            if facts["is_film"]
            else plan_image(width, height, config.media)
        )
        rows, columns = (plan.height, plan.width) if facts["is_resized"] else (height, width)
        shape = (num_frames, rows, columns, CHANNELS[mode])
        pixels = np.frombuffer(data, dtype=np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
        if pixels.size != np.prod(shape, dtype=np.int64):
            raise InvalidSegment(f"picture of {pixels.size} bytes, its facts say {'x'.join(map(str, shape))}")
        return cls(pixels.reshape(shape), mode, width, height, facts["is_film"], plan)


def is_too_large(width: int, height: int, mode: str) -> bool:
    """Whether a picture of the file's size is beyond what a `Picture` may be."""
    return max(width, height) > MAX_SIDE_PX or width * height * CHANNELS[mode] > MAX_FRAME_BYTES


def _checked(facts: Mapping[str, Any], config: EncoderConfig) -> tuple[str, int, int, int]:
    """Mode, width, height and number of frames."""
    if not isinstance(facts, Mapping) or facts.keys() != FACTS:
        raise InvalidSegment(f"facts of a picture must be {', '.join(sorted(FACTS))}")
    for name in ("is_film", "is_resized"):
        if not isinstance(facts[name], bool):
            raise InvalidSegment(f"{name} of a picture must be true or false, got {type(facts[name]).__name__}")
    is_film, mode = facts["is_film"], facts["mode"]
    allowed = tuple(CHANNELS) if config.media.transparent_background and not is_film else OPAQUE_MODES
    if not isinstance(mode, str) or mode not in allowed:
        raise InvalidSegment(f"mode of a picture must be one of {', '.join(allowed)}, got {repr(mode)[:80]}")
    bounds = {
        "width": MAX_SIDE_PX,
        "height": MAX_SIDE_PX,
        "num_frames": config.media.temporal_merge_kernel_size if is_film else 1,
    }
    for name, largest in bounds.items():
        value = facts[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise InvalidSegment(f"{name} of a picture must be an integer from 1 to {largest}, got {repr(value)[:80]}")
    width, height = facts["width"], facts["height"]
    if is_too_large(width, height, mode):
        raise InvalidSegment(f"picture of {width}x{height} pixels in {mode}, allowed up to {MAX_FRAME_BYTES} bytes")
    return mode, width, height, facts["num_frames"]
