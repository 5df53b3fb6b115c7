"""Pictures to patches on a GPU, and whether that is in service: only if it gives the bits of the CPU path at start."""

import importlib.util
import logging
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from encoder.config import Chessboard, EncoderConfig
from encoder.device_pixels_staging import TILE, Parts, StagedPixels
from encoder.errors import SetupError
from encoder.preprocess import defer_frames, defer_image, preprocess_frames, preprocess_image
from encoder.resample import mixing_tables
from encoder.segments import Segment, pack

logger = logging.getLogger(__name__)

CHOICES: Final = ("auto", "cpu", "cuda")

NUM_WARPS: Final = 8  # four pixels a thread: with more, registers leave the device too few programs to switch between


class DevicePixels:
    """The two kernels with the model's tables of mixing on one device. Works on the stream that is current."""

    def __init__(self, config: EncoderConfig, device: torch.device) -> None:
        self._board = config.media.transparent_background or Chessboard()
        self._mixing = torch.tensor(mixing_tables(self._board), device=device)

    def expand(self, staged: StagedPixels, buffer: Tensor) -> Tensor:
        """As `device_pixels_plain.expand`. Nothing here waits for the device.

        Args:
            buffer: that of `staged`, on the device.
        """
        parts, patch = staged.parts(buffer), staged.patch_size
        out = torch.empty((staged.num_patches, 3, patch, patch), dtype=torch.uint8, device=buffer.device)
        if len(parts.rows):
            out.index_copy_(0, parts.rows, parts.patches)
        if len(parts.frames):
            self._resample(buffer, parts, staged, out)
        return out

    def _resample(self, buffer: Tensor, parts: Parts, staged: StagedPixels, out: Tensor) -> None:
        from encoder import device_pixels_kernels as kernels

        middle = torch.empty(staged.middle_bytes, dtype=torch.uint8, device=buffer.device)
        first: Any = kernels.resample_first
        first[(len(parts.tiles_1),)](
            buffer, parts.frames, parts.tiles_1, parts.weights, middle, tile=TILE, num_warps=NUM_WARPS
        )
        second: Any = kernels.resample_second
        second[(len(parts.tiles_2),)](
            middle,
            parts.frames,
            parts.tiles_2,
            parts.weights,
            self._mixing,
            out,
            self._board.square_px,
            int(self._board.white_on_top_left),
            patch=staged.patch_size,
            tile=TILE,
            num_warps=NUM_WARPS,
        )


def check_wanted(wanted: str, device: torch.device) -> None:
    """Raise `SetupError` for what is no choice, or cannot be had on this device."""
    if wanted not in CHOICES:
        raise SetupError(f"preprocess_device {wanted!r}: allowed are {', '.join(CHOICES)}")
    if wanted == "cuda" and (reason := _why_not(device)):
        raise SetupError(f"preprocess_device cuda: {reason}")


def choose(wanted: str, config: EncoderConfig, device: torch.device) -> DevicePixels | None:
    """The kernels if they are wanted, the device is a GPU with Triton, and they pass their test; else None.

    Args:
        wanted: "auto", "cpu" or "cuda".
    Raises:
        SetupError: "cuda" is wanted and the test fails; `check_wanted` knows the rest beforehand.
    """
    if wanted == "cpu" or _why_not(device):
        return None
    try:
        pixels = DevicePixels(config, device)
        differing = difference(pixels, config, device)
    except Exception as error:  # whatever a kernel compiler raises, the CPU path serves
        logger.debug("preprocessing on %s failed", device, exc_info=True)
        problem = f"failed: {type(error).__name__}"
    else:
        if not differing:
            return pixels
        problem = f"{differing} bytes differ from the CPU path"
    if wanted == "cuda":
        raise SetupError(f"preprocess_device cuda: {problem}")
    logger.warning("preprocessing is out of service on %s: %s", device, problem)
    return None


def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the tower runs on {device}"
    return "Triton is not installed" if importlib.util.find_spec("triton") is None else None


TEST_SIZES: Final = ((97, 61), (40, 150), (1, 90), (90, 1), (55, 55), (20, 28))
"""(width, height) of the test pictures: both orders of the passes, one axis alone and none that changes."""
TEST_LIMIT: Final = 3  # patches of a test picture, so that small ones are resized


def difference(pixels: DevicePixels, config: EncoderConfig, device: torch.device) -> int:
    """Bytes in which pictures of every mode, frames and ready patches, prepared as one batch, differ from the CPU's."""
    small = replace(config.media, in_patch_limit=TEST_LIMIT, in_patch_limit_each_frame=TEST_LIMIT)
    config = replace(config, media=small)
    wanted: list[Segment] = []
    deferred: list[Segment] = []
    for number, (width, height) in enumerate(TEST_SIZES):
        noise = np.random.default_rng(number).integers(0, 256, (4, height, width, 4), dtype=np.uint8)
        noise[..., 3].flat[::3], noise[..., 3].flat[1::3] = 0, 255  # what alpha mostly is
        for mode, channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("CMYK", 4)):
            bands = np.ascontiguousarray(noise[0, ..., 4 - channels :])
            image = Image.frombytes(mode, (width, height), bands.tobytes())
            wanted.append(preprocess_image(image, config))
            deferred.append(defer_image(image, config))
        wanted.append(preprocess_frames(noise[: number % 4 + 1, ..., :3], config))
        deferred.append(defer_frames(noise[: number % 4 + 1, ..., :3], config))
    wanted.append(wanted[0])
    deferred.append(wanted[0])
    staged = pack(deferred, config).staged
    if staged is None:
        raise RuntimeError("no picture was deferred")
    got = pixels.expand(staged, staged.buffer.to(device))
    return int((got.cpu() != torch.cat([segment.pixel_values for segment in wanted])).sum())
