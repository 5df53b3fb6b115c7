"""Pictures of noise in every mode that matters to preprocessing, and models with small limits."""

from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from encoder.config import EncoderConfig, parse_config
from encoder.families import FAMILY_MEDIA, Family

FAMILIES: list[Family] = ["kimi_k3", "kimi_k25"]
DEVICE_MODES = ["L", "LA", "RGB", "RGBA", "CMYK"]
OTHER_MODES = ["P", "P transparent", "1", "L transparent", "RGB transparent", "I;16", "YCbCr", "I", "F"]
MODES = [*DEVICE_MODES, *OTHER_MODES]


def config(family: Family, patches: int | None = None, side: int | None = None) -> EncoderConfig:
    """The released model; `patches` and `side` replace its limits, in patches, so that small pictures are resized."""
    model = parse_config({"model_type": family}, {"media_proc_cfg": FAMILY_MEDIA[family]}, source=family)
    limits: dict[str, Any] = {}
    if patches is not None:
        limits |= {"in_patch_limit": patches, "in_patch_limit_each_frame": patches, "in_patch_limit_video": None}
    if side is not None:
        limits["patch_limit_on_one_side"] = side
    return replace(model, media=replace(model.media, **limits))


def picture(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise; a third each of alpha and of the last band is 0 and 255."""
    random = np.random.default_rng(seed)
    kind, _, transparent = mode.partition(" ")
    bands = {"LA": 2, "RGB": 3, "YCbCr": 3, "RGBA": 4, "CMYK": 4}.get(kind, 1)
    pixels = random.integers(0, 256, (height, width, bands), dtype=np.uint8)
    if bands in (2, 4):
        pixels[..., -1].flat[::3], pixels[..., -1].flat[1::3] = 0, 255
    if kind == "I;16":
        return Image.fromarray(random.integers(0, 600, (height, width)).astype(np.uint16))
    if kind == "1":
        return Image.fromarray(pixels[..., 0] > 127)
    if kind in ("I", "F"):
        return Image.fromarray(pixels[..., 0]).convert(kind)
    image = Image.frombytes(kind, (width, height), pixels.tobytes())
    if kind == "P":
        image.putpalette(random.integers(0, 256, 768, dtype=np.uint8).tobytes())
    if transparent:
        levels = random.integers(0, 256, 256, dtype=np.uint8).tobytes()
        image.info["transparency"] = {"P": levels, "L": int(pixels[0, 0, 0]), "RGB": tuple(pixels[0, 0].tolist())}[kind]
    return image
