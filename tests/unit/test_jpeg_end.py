"""A JPEG that stops early is either the whole picture or refused: no cut gives other pixels."""

import io
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.decode.jpeg_segments import read_scans
from app.decode.media import DecodeLimits
from app.decode.picture import open_picture
from app.errors import CorruptMedia
from encoder import EncoderConfig, load_config

RESTARTS: list[dict[str, Any]] = [
    {},
    {"restart_marker_blocks": 1},
    {"restart_marker_blocks": 3},
    {"restart_marker_rows": 1},
]
SAMPLINGS: list[dict[str, Any]] = [{"subsampling": "4:2:0"}, {"subsampling": "4:4:4"}, {"mode": "L"}, {"mode": "CMYK"}]


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


def jpeg(contents: str = "noise", size: tuple[int, int] = (83, 61), mode: str = "RGB", **options: Any) -> bytes:
    width, height = size
    chance = np.random.default_rng(0)
    pixels = {
        "noise": chance.integers(0, 256, (height, width, 3)),
        "nearly flat": chance.integers(126, 129, (height, width, 3)),
        "ramp": np.broadcast_to(np.arange(width)[None, :, None] * 255 // width, (height, width, 3)),
    }[contents]
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def pixels_of(data: bytes, config: EncoderConfig) -> bytes | None:
    """None if it is refused."""
    try:
        return open_picture(data, "JPEG", DecodeLimits(), config).tobytes()
    except CorruptMedia:
        return None


@pytest.mark.parametrize(
    "options",
    [
        sampling | restarts | {"progressive": progressive}
        for sampling, restarts, progressive in product(SAMPLINGS, RESTARTS, (False, True))
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_a_cut_is_refused_unless_nothing_is_lost(options: dict[str, Any], config: EncoderConfig) -> None:
    """Cuts at restart markers, through the last bytes, between the scans, and anywhere."""
    chance = random.Random(0)
    for contents, quality in (("noise", 90), ("nearly flat", 90), ("ramp", 100)):
        data = jpeg(contents, quality=quality, **options)
        whole = pixels_of(data, config)
        assert whole
        assert pixels_of(data[:-1], config) == pixels_of(data[:-2], config) == whole
        restarts = [found.start() for found in re.finditer(rb"\xff[\xd0-\xd7]", data)]
        scans = [scan.data_at for scan in read_scans(data)]
        cuts = {len(data) - lost for lost in range(3, 16)} | {chance.randrange(300, len(data) - 3) for _ in range(5)}
        cuts |= {at + more for at in restarts[:2] + restarts[-3:] for more in (0, 1, 2, 3)}
        cuts |= {at + more for at in scans[1:] for more in (-5, 0)}
        for cut in cuts:
            assert pixels_of(data[:cut], config) in (None, whole), f"{contents}, cut at {cut} of {len(data)}"


def test_every_cut_at_a_restart_marker_is_refused(config: EncoderConfig) -> None:
    """Behind a complete interval libjpeg takes nothing in, whatever stands there."""
    data = jpeg(restart_marker_blocks=1, subsampling="4:2:0")
    restarts = [found.start() for found in re.finditer(rb"\xff[\xd0-\xd7]", data)]
    assert len(restarts) == 6 * 4 - 1
    for at in restarts:
        assert pixels_of(data[:at], config) is None
        assert pixels_of(data[: at + 2], config) is None


@pytest.mark.parametrize("size", [(17, 9), (130, 70)])
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_what_was_lost_may_be_invisible(size: tuple[int, int], subsampling: str, config: EncoderConfig) -> None:
    """At the best quality a lost coefficient changes samples by less than one, or only samples beyond the border."""
    data = jpeg(size=size, quality=100, subsampling=subsampling)
    whole = pixels_of(data, config)
    for lost in range(3, 40):
        assert pixels_of(data[:-lost], config) in (None, whole)


def test_units_of_scans() -> None:
    """83x61 in 4:2:0: 6x4 units of 16 px together; alone 11x8 blocks of Y and 6x4 of Cb."""
    scans = read_scans(jpeg(progressive=True, subsampling="4:2:0"))
    units = {tuple(scan.components): scan.num_units for scan in scans}
    assert units == {(1, 2, 3): (6, 4), (1,): (11, 8), (2,): (6, 4), (3,): (6, 4)}
