"""The first bytes decide: format, kind, and that nothing else gets in."""

import io

import pytest
from PIL import Image

from app.decode.sniff import identify, settle_kind, sniff
from app.errors import UnsupportedMedia
from tests.clips import make_film


def saved(picture_format: str, num_frames: int = 1) -> bytes:
    frames = [Image.new("RGB", (20, 16), (40 * n, 0, 0)) for n in range(num_frames)]
    buffer = io.BytesIO()
    more = {"save_all": True, "append_images": frames[1:]} if num_frames > 1 else {}
    frames[0].save(buffer, picture_format, **more)
    return buffer.getvalue()


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WebP", "GIF", "BMP", "AVIF"])
def test_pictures_are_known_by_their_bytes(picture_format: str) -> None:
    found = sniff(saved(picture_format))
    assert (found.format, found.film) == (picture_format, False)
    assert settle_kind(found, None) == settle_kind(found, "image") == "image"


@pytest.mark.parametrize(
    ("container", "codec", "expected"),
    [
        ("mp4", "libx264", "MP4"),
        ("mov", "libx264", "MOV"),
        ("matroska", "libx264", "Matroska"),
        ("webm", "libvpx", "Matroska"),
        ("avi", "mpeg4", "AVI"),
        ("mpegts", "libx264", "MPEG-TS"),
        ("flv", "libx264", "FLV"),
        ("ogg", "libvpx", "Ogg"),
    ],
)
def test_films_are_known_by_their_bytes(container: str, codec: str, expected: str) -> None:
    found = sniff(make_film(3, container=container, codec=codec))
    assert (found.format, found.film) == (expected, True)
    assert settle_kind(found, None) == settle_kind(found, "video") == "video"
    with pytest.raises(UnsupportedMedia, match=rf"a film \({expected}\) sent as a picture"):
        settle_kind(found, "image")


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WebP", "BMP", "AVIF"])
def test_a_still_picture_is_no_film(picture_format: str) -> None:
    with pytest.raises(UnsupportedMedia, match=rf"a still picture \({picture_format}\) sent as a film"):
        settle_kind(sniff(saved(picture_format)), "video")


@pytest.mark.parametrize("picture_format", ["PNG", "WebP"])
def test_an_animation_is_a_picture_unless_declared_otherwise(picture_format: str) -> None:
    found = sniff(saved(picture_format, num_frames=3))
    assert found.animated
    assert settle_kind(found, None) == "image"
    with pytest.raises(UnsupportedMedia, match=f"an animated {picture_format} sent as a film; .*only GIF"):
        settle_kind(found, "video")


def test_a_gif_may_be_a_film() -> None:
    found = sniff(saved("GIF", num_frames=3))
    assert settle_kind(found, None) == "image"
    assert settle_kind(found, "video") == "video"


def test_identify_is_both_steps() -> None:
    animation = saved("GIF", num_frames=3)
    assert (identify(animation, None), identify(animation, "video")) == ("image", "video")
    with pytest.raises(UnsupportedMedia, match="a still picture"):
        identify(saved("PNG"), "video")
    with pytest.raises(UnsupportedMedia, match="no picture or film"):
        identify(b"text", None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(range(100, 112)),
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile secret.mp4\n",
        b'<?xml version="1.0"?><MPD/>',
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b'{"error": "not found"}',
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"II*\x00\x08\x00\x00\x00",
        b"8BPS\x00\x01",
        b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic",
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"\x00\x00\x00\x0cjP  \r\n\x87\n",
        b"G" + b"\x00" * 187 + b"X" + b"\x00" * 300,
    ],
)
def test_nothing_else_gets_in(data: bytes) -> None:
    with pytest.raises(
        UnsupportedMedia, match=rf"^{len(data)} bytes that are no picture or film we read; pictures: JPEG"
    ):
        sniff(data)


def test_an_endless_chain_of_png_chunks_is_given_up() -> None:
    data = b"\x89PNG\r\n\x1a\n" + (b"\x00\x00\x00\x00tEXt" + b"\x00" * 4) * 1000 + b"\x00\x00\x00\x08acTL"
    assert not sniff(data).animated
