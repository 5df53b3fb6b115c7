"""What a worker is for, pictures or films, and what it may take for one."""

import os
from dataclasses import dataclass
from typing import Final

from app.decode.media import DecodeLimits, Kind
from app.decode.sandbox import Bounds
from encoder import EncoderConfig

MAX_FACTS_BYTES: Final = 16 << 20  # facts of a film: 20 bytes a sampled frame
_CPU_GRACE_S: Final = 5.0  # beyond the deadline, which the service watches; this one holds if the service cannot


@dataclass(frozen=True)
class Duty:
    """One kind of item, and the bounds on a worker that decodes it.

    Attributes:
        noun: the kind in messages.
        deadline_s: time one item may take.
        cpu_s: CPU time one item may take, over all threads.
        max_jobs: items after which a worker is replaced.
        max_result_bytes: pixels and facts of one item.
    """

    kind: Kind
    noun: str
    deadline_s: float
    cpu_s: float
    max_jobs: int
    max_result_bytes: int
    bounds: Bounds


def duty_of(kind: Kind, limits: DecodeLimits, config: EncoderConfig) -> Duty:
    patch_bytes = 3 * config.media.patch_size**2
    max_result_bytes = max(limits.max_patches * patch_bytes, 4 * limits.max_pixels) + MAX_FACTS_BYTES
    is_film = kind == "video"
    deadline_s = limits.film_deadline_s if is_film else limits.picture_deadline_s
    return Duty(
        kind=kind,
        noun="film" if is_film else "picture",
        deadline_s=deadline_s,
        cpu_s=(deadline_s + _CPU_GRACE_S) * ((os.cpu_count() or 1) if is_film else 1),
        max_jobs=limits.film_worker_max_jobs if is_film else limits.picture_worker_max_jobs,
        max_result_bytes=max_result_bytes,
        bounds=Bounds(
            memory_bytes=limits.film_worker_memory_bytes if is_film else limits.picture_worker_memory_bytes,
            file_bytes=max_result_bytes,
            threads=is_film,  # FFmpeg's and decord's
            files=is_film,  # decord takes nothing but a path
        ),
    )
