"""A picture, or one chunk of video frames, to a uint8 `Segment`: resize, transparency, padding, patches.

A canvas is handled one patch row at a time, so the strip in work stays in the processor's cache and nothing of the
whole picture's size is made but the resized picture and the patches themselves.

Source: the released Kimi-K3 image processor and Kimi-K2.5 image and video processors, which resize with Pillow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from encoder.config import Chessboard, EncoderConfig, MediaConfig
from encoder.errors import InvalidSegment
from encoder.grid import ResizePlan, plan_frames, plan_image
from encoder.picture import CHANNELS, Picture, is_too_large
from encoder.resample import mix, white_squares
from encoder.segments import Segment

# Part of every key under which an embedding is kept: change it with any change of the pixels that come out.
PREPROCESSING_VERSION = "1"

STRIP_ROWS = 64  # of a picture, copied at a time

Pixels = NDArray[np.uint8]
Rows = Callable[[int, int], Pixels]  # (top, bottom) -> (bottom - top, width, 3), rows of the picture before padding
Frames = Pixels | Tensor | Sequence[Image.Image | Pixels | Tensor]


def preprocess_image(image: Image.Image | Pixels, config: EncoderConfig) -> Segment:
    """Turn a picture into patches as the reference does.

    Where the checkpoint has a background for transparent pictures (K3), the resize happens in the picture's own mode:
    Pillow then takes the nearest neighbour for palettes and bilevel pictures, premultiplies alpha, and 16-bit gray is
    clipped at 255 afterwards. Otherwise (K2.5) the picture becomes RGB first and alpha is dropped.

    Args:
        image: as opened, in its own mode; or the pixels of an RGB one, uint8 (H, W, 3). It is left as it was, and
            never turned by its EXIF orientation.
    Returns:
        A uint8 segment of one frame, (h*w, 3, P, P).
    Raises:
        InvalidSegment: a picture without pixels. A picture not yet loaded is loaded here, with Pillow's own errors.
    """
    media = config.media
    if isinstance(image, np.ndarray):
        frame = _checked_frame(image, "image")
        height, width = _size(frame)
        plan = plan_image(width, height, media)
        return _segment([_rows_of_frame(frame, plan)], plan)
    _check_loaded(image)
    plan = plan_image(image.width, image.height, media)
    if media.transparent_background is None:
        rows = _rows_of_rgb(_resize(_to_rgb(image), plan))
    else:
        rows = _rows_on_background(_resize(image, plan), media.transparent_background)
    return _segment([rows], plan)


def preprocess_frames(frames: Frames, config: EncoderConfig) -> Segment:
    """Turn one chunk of video frames into one segment; the first frame's size decides for all.

    Args:
        frames: 1 to `temporal_merge_kernel_size` frames of equal size: uint8 (t, H, W, 3), or a sequence of pictures
            or of uint8 (H, W, 3) arrays. Pictures become RGB, alpha is dropped for every family.
    Returns:
        A uint8 segment, (t*h*w, 3, P, P).
    Raises:
        InvalidSegment: too few or too many frames, unequal sizes, another dtype or shape.
    """
    chunk = _checked_frames(frames, config.media)
    height, width = _size(chunk[0])
    plan = plan_frames(width, height, len(chunk), config.media)
    return _segment([_rows_of_frame(frame, plan) for frame in chunk], plan)


def defer_image(image: Image.Image | Pixels, config: EncoderConfig) -> Segment:
    """The segment of a picture whose resize, transparency and patches are left to the device.

    The patches will be those of `preprocess_image`, to the last bit. What needs Pillow happens here: the conversion to
    RGB where the model wants it first, and the resize of palettes, bilevel, 16-bit and other rare modes. A picture with
    a side beyond 32,768 pixels, or of more than 1 GiB, is prepared here altogether.

    Args, Raises: as `preprocess_image`.
    """
    media = config.media
    if isinstance(image, np.ndarray):
        height, width = _size(_checked_frame(image, "image"))
        if is_too_large(width, height, "RGB"):
            return preprocess_image(image, config)
        pixels = np.ascontiguousarray(image)[None]
        return Segment.deferred(Picture(pixels, "RGB", width, height, False, plan_image(width, height, media)))
    _check_loaded(image)
    width, height = image.size
    plan = plan_image(width, height, media)
    source = _gray_or_rgb(image) if media.transparent_background is None else _resizable(image, plan)
    if is_too_large(width, height, source.mode):
        return preprocess_image(image, config)
    return Segment.deferred(Picture(_pixels(source)[None], source.mode, width, height, False, plan))


def defer_frames(frames: Frames, config: EncoderConfig) -> Segment:
    """The segment of one chunk of video frames, prepared on the device; the patches are those of `preprocess_frames`.

    Frames that are one contiguous array (t, H, W, 3) are not copied: they must stay as they are.

    Args, Raises: as `preprocess_frames`.
    """
    chunk = _checked_frames(frames, config.media)
    height, width = _size(chunk[0])
    plan = plan_frames(width, height, len(chunk), config.media)
    if is_too_large(width, height, "RGB"):
        return preprocess_frames(frames, config)
    whole = frames.numpy(force=True) if isinstance(frames, Tensor) else frames
    if not isinstance(whole, np.ndarray):
        whole = np.stack([_pixels(frame) if isinstance(frame, Image.Image) else frame for frame in chunk])
    return Segment.deferred(Picture(np.ascontiguousarray(whole), "RGB", width, height, True, plan))


def _check_loaded(image: Any) -> None:
    """Load a picture: what a file says only after its pixels, transparency for example, counts too."""
    if not isinstance(image, Image.Image):
        raise InvalidSegment(f"image must be a PIL picture, got {type(image).__name__}")
    image.load()


def _gray_or_rgb(image: Image.Image) -> Image.Image:
    """RGB as `_to_rgb` makes it, or gray where all three channels of that would be equal: a third of the bytes."""
    if image.mode == "L":
        return image
    return image.getchannel("L") if image.mode == "LA" else _to_rgb(image)


def _resizable(image: Image.Image, plan: ResizePlan) -> Image.Image:
    """The picture in its own mode where the device can resize that, else resized and in RGB or RGBA."""
    # A level that means transparent counts after the resize, for every mode but RGB, where it never does.
    if image.mode == "RGB" or (image.mode in CHANNELS and "transparency" not in image.info):
        return image
    resized = _resize(image, plan)
    # A copy: converting a palette with transparency writes into the palette of what is converted.
    copy = resized.copy() if resized is image else resized
    return copy.convert("RGBA" if image.has_transparency_data else "RGB")


def _pixels(image: Image.Image) -> Pixels:
    """(H, W, C) of a picture in a mode of `CHANNELS`; in strips, five times as fast as Pillow's own way for 12 MP."""
    width, height = image.size
    pixels: Pixels = np.empty((height, width, CHANNELS[image.mode]), dtype=np.uint8)
    for top in range(0, height, STRIP_ROWS):
        strip = image.crop((0, top, width, min(top + STRIP_ROWS, height)))
        pixels[top : top + STRIP_ROWS] = np.asarray(strip).reshape(strip.height, width, -1)
    return pixels


def _segment(frames: Sequence[Rows], plan: ResizePlan) -> Segment:
    """Pad with zeros at the right and bottom and cut into patches, straight into the segment's own buffer."""
    grid, patch = plan.grid(len(frames)), plan.patch_size
    patches: Pixels = np.empty((grid.t, grid.h, grid.w, 3, patch, patch), dtype=np.uint8)
    for rows, frame in zip(frames, patches, strict=True):
        strip: Pixels = np.zeros((patch, plan.padded_width, 3), dtype=np.uint8)
        for y, patch_row in enumerate(frame):
            top = y * patch
            bottom = min(top + patch, plan.height)
            if bottom > top:
                strip[: bottom - top, : plan.width] = rows(top, bottom)
            strip[max(bottom - top, 0) :] = 0
            # (dy, x, dx, channel) -> (x, channel, dy, dx)
            patch_row[...] = strip.reshape(patch, grid.w, patch, 3).transpose(1, 3, 0, 2)
    return Segment(torch.from_numpy(patches.reshape(-1, 3, patch, patch)), grid)


def _resize(image: Image.Image, plan: ResizePlan) -> Image.Image:
    size = (plan.width, plan.height)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if "transparency" in image.info:
        # It has no effect on RGB values, but Pillow would warn that it gets lost.
        image = image.copy()
        del image.info["transparency"]
    return image.convert("RGB")


def _rows_of_rgb(image: Image.Image) -> Rows:
    return lambda top, bottom: np.asarray(image.crop((0, top, image.width, bottom)))


def _rows_on_background(image: Image.Image, board: Chessboard) -> Rows:
    """Rows of a resized picture in its own mode; transparent ones are laid on the chessboard."""
    if image.mode == "RGB":  # as it is, even if the file names a transparent colour
        return _rows_of_rgb(image)
    mode = "RGBA" if image.has_transparency_data else "RGB"

    def rows(top: int, bottom: int) -> Pixels:
        # The crop is a copy: converting a palette with transparency writes into the palette of what is converted.
        strip: Pixels = np.asarray(image.crop((0, top, image.width, bottom)).convert(mode))
        return _composite(strip, top, board) if mode == "RGBA" else strip

    return rows


def _composite(rgba: Pixels, top: int, board: Chessboard) -> Pixels:
    """(n, W, 4) rows that begin at row `top` of the picture -> (n, W, 3), in float32 and truncated as the reference."""
    if rgba[..., 3].min() == 255:  # opaque: what follows would return the same values
        return rgba[..., :3]
    height, width = rgba.shape[:2]
    white = white_squares(np.arange(top, top + height), np.arange(width), board)
    return mix(rgba[..., :3], rgba[..., 3:], np.where(white, board.white, board.gray)[..., None])


def _checked_frames(frames: Any, media: MediaConfig) -> list[Image.Image | Pixels]:
    """One RGB picture or (H, W, 3) array per frame, of equal sizes."""
    if isinstance(frames, Tensor):
        frames = frames.numpy(force=True)
    if isinstance(frames, np.ndarray) and frames.ndim != 4:
        raise InvalidSegment(f"frames must be (t, H, W, 3), got {frames.shape}")
    if not isinstance(frames, np.ndarray | Sequence):
        raise InvalidSegment(f"frames must be an array (t, H, W, 3) or a sequence, got {type(frames).__name__}")
    if not 1 <= len(frames) <= media.temporal_merge_kernel_size:
        raise InvalidSegment(f"chunk of {len(frames)} frames, allowed 1 to {media.temporal_merge_kernel_size}")
    chunk = [_checked_frame(frame, f"frames[{i}]") for i, frame in enumerate(frames)]
    height, width = _size(chunk[0])
    for i, frame in enumerate(chunk):
        if _size(frame) != (height, width):
            h, w = _size(frame)
            raise InvalidSegment(f"frames[{i}] has {w}x{h} pixels, the first frame of its chunk {width}x{height}")
    return chunk


def _checked_frame(frame: Any, where: str) -> Image.Image | Pixels:
    if isinstance(frame, Image.Image):
        return _to_rgb(frame)
    if isinstance(frame, Tensor):
        frame = frame.numpy(force=True)
    if not isinstance(frame, np.ndarray):
        raise InvalidSegment(f"{where} must be a picture or an array, got {type(frame).__name__}")
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise InvalidSegment(f"{where} must be uint8 (H, W, 3), got {frame.dtype} {frame.shape}")
    return frame


def _size(frame: Image.Image | Pixels) -> tuple[int, int]:
    """(height, width) in pixels."""
    return (frame.height, frame.width) if isinstance(frame, Image.Image) else (frame.shape[0], frame.shape[1])


def _rows_of_frame(frame: Image.Image | Pixels, plan: ResizePlan) -> Rows:
    if isinstance(frame, Image.Image):
        return _rows_of_rgb(_resize(frame, plan))
    if _size(frame) == (plan.height, plan.width):
        return lambda top, bottom: frame[top:bottom]
    return _rows_of_rgb(_resize(Image.fromarray(frame), plan))
