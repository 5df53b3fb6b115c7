"""Bytes of a picture to a `Segment`, through Pillow, in the picture's own mode and never beyond its first frame."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

from app.decode.jpeg_end import load_without_end
from app.decode.jpeg_turbo import decode_rgb
from app.decode.media import DecodeLimits, MediaOptions, Prepared
from app.decode.picture_work import BoundedFile, check_chunks, check_runs, check_scans
from app.errors import CorruptMedia, LimitExceeded
from encoder import EncoderConfig, defer_image, preprocess_image
from encoder.grid import ResizePlan, plan_image

# The readers by name rather than `Image.open`: no other of Pillow's formats can be reached, and the header is read
# without Pillow's process-wide check, which warns above 89 and raises above 179 million pixels before we know the size.
_READERS: Final[dict[str, Callable[[BoundedFile], ImageFile.ImageFile]]] = {
    "JPEG": JpegImagePlugin.jpeg_factory,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
}

# EXIF orientation -> the turn that undoes it
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def prepare_picture(
    data: bytes,
    picture_format: str,
    options: MediaOptions,
    limits: DecodeLimits,
    config: EncoderConfig,
    *,
    defer: bool = False,
) -> Prepared:
    """Decode and preprocess one picture.

    Args:
        picture_format: as `sniff` names it.
        defer: leave to the device what can be left to it, see `encoder.defer_image`.
    Raises:
        LimitExceeded: too many pixels or patches, known from the header before anything is decoded.
        CorruptMedia: the picture does not decode completely.
        MemoryError: it needs more than its process may have.
    """
    started = time.perf_counter()
    image: Image.Image | NDArray[np.uint8]
    if options.apply_exif_orientation:
        image = _turn(open_picture(data, picture_format, limits, config))
    else:
        image = decode_picture(data, picture_format, limits, config)
    decoded = time.perf_counter()
    segment = defer_image(image, config) if defer else preprocess_image(image, config)
    width, height = image.size if isinstance(image, Image.Image) else (image.shape[1], image.shape[0])
    plan = plan_image(width, height, config.media)
    return Prepared(
        kind="image",
        segments=[segment],
        original_size=(width, height),
        resized_size=(plan.width, plan.height),
        frame_indices=None,
        start_s=None,
        timestamps=None,
        decode_s=decoded - started,
        preprocess_s=time.perf_counter() - decoded,
    )


def decode_picture(
    data: bytes, picture_format: str, limits: DecodeLimits, config: EncoderConfig
) -> Image.Image | NDArray[np.uint8]:
    """The first frame, in its own mode, or the same pixels as (H, W, 3) if RGB. Raises as `prepare_picture`."""
    image = _opened(data, picture_format, limits, config)
    pixels = decode_rgb(data, image) if picture_format == "JPEG" else None
    return _loaded(image, data, picture_format, limits, config) if pixels is None else pixels


def open_picture(data: bytes, picture_format: str, limits: DecodeLimits, config: EncoderConfig) -> Image.Image:
    """The first frame, loaded, in its own mode. Raises as `prepare_picture`."""
    image = _opened(data, picture_format, limits, config)
    return _loaded(image, data, picture_format, limits, config)


def _opened(data: bytes, picture_format: str, limits: DecodeLimits, config: EncoderConfig) -> Image.Image:
    """The picture by its header, once that is found within the limits."""
    if picture_format == "PNG":
        check_chunks(data)
    image: Image.Image = _read_header(data, picture_format)
    check_picture(*image.size, limits, config)
    if picture_format == "JPEG":
        check_scans(data, image.width * image.height)
    elif picture_format == "BMP":
        check_runs(data, image.width * image.height)
    return image


def _loaded(
    image: Image.Image, data: bytes, picture_format: str, limits: DecodeLimits, config: EncoderConfig
) -> Image.Image:
    try:
        image.load()
    except (LimitExceeded, MemoryError):
        raise
    except Exception as error:
        whole = _load_without_end(data) if picture_format == "JPEG" else None
        if whole is None:
            raise _corrupt(picture_format) from error
        image = whole
    # Some formats settle their size only while they decode.
    check_picture(*image.size, limits, config)
    return image


def check_picture(width: int, height: int, limits: DecodeLimits, config: EncoderConfig) -> ResizePlan:
    """Refuse a picture by its size; else say what preprocessing makes of it."""
    if width < 1 or height < 1:
        raise CorruptMedia(f"picture of {width}x{height} pixels: both sides must be at least 1")
    if width * height > limits.max_pixels:
        raise LimitExceeded(f"picture of {width}x{height} pixels, limit {limits.max_pixels}")
    plan = plan_image(width, height, config.media)
    if plan.grid().num_patches > limits.max_patches:
        raise LimitExceeded(f"picture of {plan.grid().num_patches} patches, limit {limits.max_patches}")
    return plan


def _read_header(data: bytes, picture_format: str) -> ImageFile.ImageFile:
    try:
        return _READERS[picture_format](BoundedFile(data, picture_format))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LimitExceeded("picture with a frame of more pixels than its header says") from error
    except (LimitExceeded, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise whatever the bytes drive them to
        raise _corrupt(picture_format) from error


def _load_without_end(data: bytes) -> Image.Image | None:
    try:
        return load_without_end(data)
    except Exception:  # broken elsewhere too
        return None


def _turn(image: Image.Image) -> Image.Image:
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # unreadable EXIF says nothing about the pixels
        return image
    return image if turn is None else image.transpose(turn)


def _corrupt(picture_format: str) -> CorruptMedia:
    return CorruptMedia(f"{picture_format} picture that does not decode completely")
