"""The values that go into and come out of decoding: options of a request, limits of the service, one prepared item."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from encoder import Segment

Kind = Literal["image", "video"]


@dataclass(frozen=True)
class MediaOptions:
    """What a request may ask of one item; the defaults are the reference's behaviour.

    Attributes:
        fps: frames per second to sample from a film; None is the checkpoint's rate.
        max_frames: at most so many frames, spread over the whole film.
        allow_partial: take the frames of a damaged film that do decode, instead of refusing it.
        apply_exif_orientation: turn a picture as its EXIF orientation says.
    """

    fps: float | None = None
    max_frames: int | None = None
    allow_partial: bool = False
    apply_exif_orientation: bool = False


@dataclass(frozen=True)
class DecodeLimits:
    """Bounds on one item. All but deadlines and memory are checked before a pixel is decoded.

    Attributes:
        max_pixels: width times height of a picture or a film's frame.
        max_patches: patches of the whole item, over all its segments.
        max_sampled_frames: frames taken from one film.
        max_walked_frames: frames in one film, since most of them must be decoded to reach the sampled ones.
        max_film_duration_s: length of a film by its own header.
        picture_deadline_s, film_deadline_s: time that decoding and preprocessing one may take once a worker has it.
        picture_worker_memory_bytes, film_worker_memory_bytes: address space that one may add to its worker.
        picture_worker_max_jobs: pictures after which a worker is replaced; nothing that got into it stays longer.
        film_worker_max_jobs: the same for films (decord leaks 0.3 MB for each film it refuses).
        decord_batch_bytes: RGB frames that decord may hold at once; it can only deliver all of a film together.
    """

    max_pixels: int = 64_000_000
    max_patches: int = 1_048_576
    max_sampled_frames: int = 2048
    max_walked_frames: int = 36_000
    max_film_duration_s: float = 6 * 3600.0
    picture_deadline_s: float = 30.0
    film_deadline_s: float = 60.0
    picture_worker_memory_bytes: int = 2 << 30
    film_worker_memory_bytes: int = 4 << 30
    picture_worker_max_jobs: int = 1000
    film_worker_max_jobs: int = 200
    decord_batch_bytes: int = 256 << 20


class Jobs(NamedTuple):
    """Items being decoded, and waiting for it."""

    running: int
    waiting: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """One item, ready for the tower.

    Attributes:
        segments: one for a picture, one for each chunk of a film; uint8 patches.
        original_size: decoded (width, height) in pixels, after the turn where one is applied.
        resized_size: (width, height) in pixels after the resize, before padding.
        frame_indices: positions of the sampled frames in the film; None for a picture, as the next two.
        start_s: time of each chunk's first frame, in seconds.
        timestamps: the same as the model's prompt prints it.
        decode_s, preprocess_s: time spent, in seconds.
    """

    kind: Kind
    segments: list[Segment]
    original_size: tuple[int, int]
    resized_size: tuple[int, int]
    frame_indices: list[int] | None
    start_s: list[float] | None
    timestamps: list[str] | None
    decode_s: float
    preprocess_s: float
