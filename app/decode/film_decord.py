"""Frames through decord, which the distribution decord2 supplies. Only ever called inside a film worker.

decord crashes on some bytes, hangs on others, and decodes ahead without bound between calls; hence a path instead of
bytes, one thread, one call for all frames, and a process that may be lost.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.decode.film_facts import FilmHeader
from encoder import SetupError

_DISTRIBUTION: Final = "decord2"
_IMPOSTOR: Final = "decord"  # installs the same files: FFmpeg of 2018, hangs on valid films, reads no AV1

# As a share of all frames: a single frame that decord had to fill with a copy of another one is too many.
_MAX_COPIED_SHARE: Final = 1e-6


class DecordFailed(Exception):
    """decord raised or delivered something else than asked; the film may still be a good one."""


def check_distribution() -> None:
    """Raise `SetupError` unless `import decord` gets what this service was measured with."""
    if _is_installed(_IMPOSTOR):
        raise SetupError(f"the distribution {_IMPOSTOR} is installed: uninstall it, then reinstall {_DISTRIBUTION}")
    if not _is_installed(_DISTRIBUTION):
        raise SetupError(f"the distribution {_DISTRIBUTION} is not installed")


def frames(path: str, header: FilmHeader, indices: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(index, (H, W, 3) RGB as displayed) of every wanted frame.

    Args:
        indices: ascending positions in the film.
    Raises:
        DecordFailed: take the other decoder.
    """
    width, height = header.turned_size
    complaints = _complaint_bytes()
    try:
        import decord

        reader = decord.VideoReader(path, num_threads=1, fault_tol=_MAX_COPIED_SHARE)
        if len(reader) != header.num_frames:
            raise DecordFailed(f"{len(reader)} frames instead of {header.num_frames}")
        batch = reader.get_batch(list(indices)).asnumpy()
        del reader  # it would go on decoding ahead
        if _complaint_bytes() > complaints:
            raise DecordFailed("FFmpeg complained: some of the frames may be made up")
    except MemoryError:
        raise
    except DecordFailed:
        raise
    except Exception as error:
        raise DecordFailed("decord raised") from error
    if batch.shape != (len(indices), height, width, 3) or batch.dtype != np.uint8:
        raise DecordFailed(f"frames of shape {batch.shape}")
    return zip(indices, batch, strict=True)


def _complaint_bytes() -> int:
    """How much FFmpeg has printed, where standard error is a file, as it is in a film worker.

    decord passes on frames that FFmpeg could only guess, and does not say so; FFmpeg does.
    """
    return os.fstat(sys.__stderr__.fileno()).st_size if sys.__stderr__ else 0


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
