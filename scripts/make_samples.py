"""Render the two bundled samples, `samples/photo.jpg` and `samples/clip.mp4`: the same pixels on every run.

python scripts/make_samples.py [DIRECTORY]
"""

import math
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.float64]  # (H, W)
Picture = NDArray[np.float64]  # (H, W, 3), 0 to 255

PHOTO_SIZE = (1024, 768)
CLIP_SIZE = (320, 180)
CLIP_FPS = 24
CLIP_SECONDS = 4


def smooth_noise(rng: np.random.Generator, width: int, height: int, cell: int) -> Plane:
    """Values in 0 to 1 that change over about `cell` pixels."""
    coarse = rng.random((height // cell + 2, width // cell + 2)) * 255
    grown = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(grown, dtype=np.float64) / 255


def blend(picture: Picture, colour: tuple[int, int, int], share: Plane) -> None:
    """Mix `colour` into `picture`, each pixel by its share."""
    picture += (np.array(colour, dtype=np.float64) - picture) * np.clip(share, 0, 1)[..., None]


def landscape(width: int, height: int, sun: tuple[float, float], seed: int = 7) -> Picture:
    """Evening over hills and a lake; `sun` is its centre as shares of width and height."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    down = y / height
    picture = np.empty((height, width, 3))
    picture[:] = (38, 66, 128)
    blend(picture, (236, 148, 92), (down / 0.62) ** 1.6)
    clouds = 0.6 * smooth_noise(rng, width, height, max(width // 7, 2)) + 0.4 * smooth_noise(
        rng, width, height, max(width // 24, 2)
    )
    blend(picture, (255, 214, 190), np.clip((clouds - 0.52) * 2.2, 0, 0.7) * (down < 0.6))
    distance = np.hypot(x - sun[0] * width, y - sun[1] * height) / width
    blend(picture, (255, 190, 110), np.exp(-distance * 7) * 0.8)
    blend(picture, (255, 246, 214), (0.045 - distance) * width / 2)
    ridges = ((0.50, 0.075, 3.1, (118, 104, 140)), (0.57, 0.055, 5.3, (74, 82, 112)), (0.63, 0.045, 8.2, (38, 58, 66)))
    for level, swing, waves, colour in ridges:
        phase = rng.random(3) * math.tau
        across = np.arange(width) / width * math.tau
        ridge = level + swing * (
            0.5 * np.sin(waves * across / 2 + phase[0])
            + 0.3 * np.sin(waves * across * 1.7 + phase[1])
            + 0.12 * np.sin(waves * across * 6.1 + phase[2])
        )
        blend(picture, colour, (y - ridge[None, :] * height) / 1.5)
    shore = 0.74
    lake = np.clip((down - shore) * height / 2, 0, 1)
    mirrored = picture[np.clip((2 * shore * height - y).astype(int), 0, height - 1), x]
    ripples = 0.72 + 0.22 * smooth_noise(rng, width, height * 4, max(width // 30, 2))[::4]
    picture += (mirrored * ripples[..., None] * (0.82, 0.9, 1.0) - picture) * lake[..., None]
    return picture


def grain(picture: Picture, strength: float, seed: int = 11) -> NDArray[np.uint8]:
    noise = np.random.default_rng(seed).normal(0, strength, picture.shape[:2])[..., None]
    pixels: NDArray[np.uint8] = np.clip(np.rint(picture + noise), 0, 255).astype(np.uint8)
    return pixels


def make_photo(path: Path) -> None:
    picture = landscape(*PHOTO_SIZE, sun=(0.68, 0.40))
    Image.fromarray(grain(picture, 3.0)).save(path, "JPEG", quality=82, optimize=True)


def make_clip(path: Path) -> None:
    """The sun sets behind the hills while a balloon drifts across."""
    width, height = CLIP_SIZE
    y, x = np.mgrid[0:height, 0:width]
    num_frames = CLIP_FPS * CLIP_SECONDS
    with av.open(str(path), "w", options={"movflags": "faststart"}) as output:
        stream: Any = output.add_stream("libx264", rate=CLIP_FPS, options={"crf": "26", "preset": "slow"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # the bytes then do not depend on the machine
        for number in range(num_frames):
            progress = number / (num_frames - 1)
            picture = landscape(width, height, sun=(0.62, 0.28 + 0.34 * progress)) * (1 - 0.25 * progress)
            centre_x = (0.08 + 0.78 * progress) * width
            centre_y = (0.34 - 0.10 * math.sin(progress * math.pi)) * height
            blend(picture, (196, 52, 60), 15 - np.hypot(x - centre_x, (y - centre_y) * 0.9))
            blend(
                picture,
                (240, 206, 96),
                np.minimum(3 - np.abs(x - centre_x), 15 - np.hypot(x - centre_x, (y - centre_y) * 0.9)),
            )
            blend(picture, (92, 60, 40), np.minimum(4 - np.abs(x - centre_x), 3 - np.abs(y - centre_y - 24)))
            frame = av.VideoFrame.from_ndarray(grain(picture, 0.0), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "samples"
    directory.mkdir(exist_ok=True)
    for name, make in (("photo.jpg", make_photo), ("clip.mp4", make_clip)):
        make(directory / name)
        print(f"{directory / name}: {(directory / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
