"""A few seconds of broken media; `make fuzz` goes on for as long as it is told to."""

import os

import pytest

from tests.fuzz.media import fuzz

SECONDS = float(os.environ.get("FUZZ_MEDIA_S", "12"))


@pytest.mark.filterwarnings("ignore")  # Pillow's, which the service leaves to Python's own rules
async def test_broken_media_is_encoded_or_refused() -> None:
    report = await fuzz(SECONDS, seed=1)
    assert report.wrong == []
    assert report.inputs["image"] > 20
    assert report.inputs["video"] > 2
    assert any(code.endswith("corrupt_media") for code in report.codes)
    assert any(code.endswith("ok") for code in report.codes)
