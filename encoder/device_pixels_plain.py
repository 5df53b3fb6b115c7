"""Staged pixels to patches in plain PyTorch: what the kernels do, one frame after the other, on any device."""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import Chessboard
from encoder.device_pixels_staging import Fact, StagedPixels
from encoder.resample import PRECISION_BITS, mixing_tables, white_squares


def expand(staged: StagedPixels, board: Chessboard | None) -> Tensor:
    """(L, 3, P, P) uint8 on the buffer's device, the same bits as `preprocess_image` and `preprocess_frames` give.

    Args:
        board: of the model whose pictures these are; None where it has no background for transparent ones.
    """
    parts, patch = staged.parts(staged.buffer), staged.patch_size
    out = torch.empty((staged.num_patches, 3, patch, patch), dtype=torch.uint8, device=staged.buffer.device)
    out[parts.rows] = parts.patches
    flat = out.view(-1)
    for facts in parts.frames.tolist():
        at, num_bytes = facts[Fact.OUT], facts[Fact.OUT_BYTES]
        frame = _frame(facts, staged.buffer, parts.weights, board or Chessboard())
        flat[at : at + num_bytes] = _patches(frame, facts, patch).reshape(-1)
    return out


def _frame(facts: list[int], buffer: Tensor, tables: Tensor, board: Chessboard) -> Tensor:
    """(H, W, 3) int32, resized and without transparency."""
    channels, row, at = facts[Fact.CHANNELS], facts[Fact.ROW], facts[Fact.SOURCE]
    first_axis = 0 if facts[Fact.VERTICAL_FIRST] else 1
    height = 1 + facts[Fact.LAST_1 if first_axis == 0 else Fact.LAST_2]
    pixels = buffer[at : at + height * row].view(height, row // channels, channels).to(torch.int32)
    if facts[Fact.PREMULTIPLY]:
        pixels = _premultiplied(pixels)
    pixels = _resampled(pixels, first_axis, facts[Fact.WEIGHTS_1 : Fact.LAST_1], tables)
    pixels = _resampled(pixels, 1 - first_axis, facts[Fact.WEIGHTS_2 : Fact.LAST_2], tables)
    levels, fourth = pixels, pixels[..., -1:]
    if channels == 3:
        return levels
    levels = (levels[..., :1] if channels < 3 else levels[..., :3]).expand(-1, -1, 3)
    if not facts[Fact.MIXING]:
        return levels
    rows, columns = np.arange(facts[Fact.HEIGHT]), np.arange(facts[Fact.WIDTH])
    white = torch.from_numpy(white_squares(rows, columns, board)).to(pixels.device)[..., None]
    table = _mixing(board, pixels.device)[facts[Fact.MIXING] - 1]
    return table[white.int(), fourth, levels].to(torch.int32)


def _premultiplied(pixels: Tensor) -> Tensor:
    """Levels times alpha / 255, rounded as Pillow does it in integers."""
    levels, alpha = pixels[..., :-1], pixels[..., -1:]
    product = levels * alpha + 128
    return torch.cat([((product >> 8) + product) >> 8, alpha], dim=-1)


def _resampled(pixels: Tensor, axis: int, where: list[int], tables: Tensor) -> Tensor:
    """One pass along an axis of (H, W, C) int32."""
    at, num_out, num_taps = where
    table = tables[at : at + (1 + num_taps) * num_out].view(1 + num_taps, num_out)
    shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
    total: Tensor | int = 1 << (PRECISION_BITS - 1)
    for tap, weight in enumerate(table[1:]):
        taken = torch.clamp(table[0] + tap, max=pixels.shape[axis] - 1)  # beyond the last pixel weights are zero
        total = total + weight.view(shape) * pixels.index_select(axis, taken)
    return (torch.as_tensor(total) >> PRECISION_BITS).clamp(0, 255)


def _patches(frame: Tensor, facts: list[int], patch: int) -> Tensor:
    """(H, W, 3) -> (h, w, 3, P, P) uint8, with zeros at the right and at the bottom."""
    columns = facts[Fact.PATCH_COLUMNS]
    rows = facts[Fact.OUT_BYTES] // (3 * patch * patch * columns)
    height, width, _ = frame.shape
    padded = F.pad(frame.to(torch.uint8), (0, 0, 0, columns * patch - width, 0, rows * patch - height))
    return padded.view(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)


@lru_cache(maxsize=4)
def _mixing(board: Chessboard, device: torch.device) -> Tensor:
    return torch.tensor(mixing_tables(board), device=device)
