"""Films: the right frames, from either decoder, or a client error. Row numbers (m23 ...) are those of the media cases.

Every frame carries its own number, so a wrong one is seen.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.decode import film_decord, film_pyav
from app.decode.facts import Facts
from app.decode.film import prepare_film
from app.decode.film_facts import FilmHeader
from app.decode.film_header import read_header
from app.decode.film_parameters import frame_parameters
from app.decode.media import DecodeLimits, MediaOptions
from app.decode.picture import prepare_picture
from app.errors import CorruptMedia, LimitExceeded, UnsupportedMedia
from encoder import EncoderConfig, Segment, load_config, plan_video, preprocess_frames
from tests.clips import Frame, change_size, frames_of, make_film, numbered_frame, read_number, remux

SAMPLES = Path(__file__).parents[2] / "samples"
LIMITS = DecodeLimits()
ALL = MediaOptions(fps=1000.0)  # every frame
X265_QUIET = "log-level=none"


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


@contextmanager
def stored(data: bytes) -> Iterator[str]:
    """A path to the bytes, as a worker sees them."""
    descriptor = os.memfd_create("film")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def header_of(data: bytes, limits: DecodeLimits = LIMITS) -> FilmHeader:
    with stored(data) as path:
        return read_header(path, limits)


def prepare(
    data: bytes, config: EncoderConfig, options: MediaOptions = ALL, limits: DecodeLimits = LIMITS
) -> tuple[Facts, list[Segment]]:
    segments: list[Segment] = []
    with stored(data) as path:
        return prepare_film(path, options, limits, config, segments.append), segments


def numbers(facts: Facts, segments: list[Segment]) -> list[int]:
    """The number that each frame of the result carries."""
    return [read_number(frame) for segment in segments for frame in frames_of(segment, facts.original_size)]


def by_decord(data: bytes, header: FilmHeader, indices: list[int]) -> dict[int, Frame]:
    with stored(data) as path:
        return dict(film_decord.frames(path, header, indices))


def by_pyav(data: bytes, header: FilmHeader, indices: list[int]) -> dict[int, Frame]:
    with stored(data) as path:
        return dict(film_pyav.frames(path, header, indices, LIMITS.max_pixels))


# What a film is made of, and why decord does not get it.
FILMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "h264_mp4": ({}, None),
    "h264_mov": ({"container": "mov"}, None),
    "h264_mkv": ({"container": "matroska"}, None),
    "h264_flv": ({"container": "flv"}, None),
    "h264_fragmented": (
        {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "codec_options": {"g": "12"}},
        None,
    ),
    "h264_10_bit": ({"pix_fmt": "yuv420p10le"}, None),
    "h264_444_odd": ({"pix_fmt": "yuv444p", "size": (191, 161)}, None),
    "h264_vfr": ({"stamps": [100 * n if n < 24 else 2400 + 37 * (n - 24) for n in range(48)]}, None),
    "hevc": ({"codec": "libx265", "codec_options": {"x265-params": X265_QUIET + ":open-gop=0"}}, None),
    "vp8_hidden_frames": (
        {"container": "webm", "codec": "libvpx", "codec_options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
        None,
    ),
    "vp9": ({"container": "webm", "codec": "libvpx-vp9"}, None),
    "h264_ts": ({"container": "mpegts"}, "container"),
    "mpeg4_avi": ({"container": "avi", "codec": "mpeg4"}, "container"),
    "vp8_ogg": ({"container": "ogg", "codec": "libvpx"}, "container"),
    "av1": ({"codec": "libsvtav1"}, "codec"),
    "mjpeg": ({"codec": "mjpeg", "pix_fmt": "yuvj420p"}, "codec"),
    "h264_narrow": ({"size": (96, 160)}, "narrow"),
    "h264_narrow_when_turned": ({"size": (192, 96), "rotation": 90}, "narrow"),
    "h264_interlaced": ({"codec_options": {"flags": "+ildct+ilme"}}, "interlaced"),
    "h264_equal_stamps": (
        {"container": "matroska", "codec_options": {"bf": "0"}, "stamps": [100 * (n - (n == 20)) for n in range(48)]},
        "equal or missing stamps",
    ),
    "h264_open_gop": (
        {"codec_options": {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0"}},
        "open GOP",
    ),
    "hevc_open_gop": (
        {"codec": "libx265", "codec_options": {"x265-params": X265_QUIET + ":keyint=12:min-keyint=12:open-gop=1"}},
        "open GOP",
    ),
    "gif": ({"container": "gif", "codec": "gif", "pix_fmt": "rgb8"}, "container"),
}


@pytest.mark.parametrize("name", FILMS)
def test_every_frame_is_the_right_one(name: str, config: EncoderConfig) -> None:
    how, not_for_decord = FILMS[name]
    data = make_film(48, **how)
    header = header_of(data)
    assert header.not_for_decord == not_for_decord
    assert header.num_frames == 48
    indices = list(range(48))
    frames = by_pyav(data, header, indices)
    turns = -header.rotation // 90
    assert [read_number(np.rot90(frame, turns)) for frame in frames.values()] == list(frames) == indices
    if not_for_decord is None:
        same = by_decord(data, header, indices)
        assert list(same) == indices
        assert all(np.array_equal(same[index], frames[index]) for index in indices)


def test_sampling_follows_the_plan(config: EncoderConfig) -> None:
    facts, segments = prepare(make_film(48), config, MediaOptions())
    plan = plan_video(48, 24.0, config)
    assert facts.frame_indices == plan.frame_indices == numbers(facts, segments)
    assert (facts.start_s, facts.timestamps) == (plan.start_s, plan.timestamps)
    assert facts.grids == [(4, 12, 14)] * 4 == [tuple(segment.grid_thw) for segment in segments]
    assert facts.original_size == facts.resized_size == (192, 160)


def test_both_decoders_give_the_same_segments(config: EncoderConfig) -> None:
    data = make_film(48, codec="libx265", codec_options={"x265-params": X265_QUIET + ":open-gop=0"})
    _, through_decord = prepare(data, config)
    _, through_pyav = prepare(data, config, limits=DecodeLimits(decord_batch_bytes=0))
    assert len(through_decord) == len(through_pyav) == 12
    for one, other in zip(through_decord, through_pyav, strict=True):
        assert one.pixel_values.equal(other.pixel_values)


def test_the_callers_rate_and_cap(config: EncoderConfig) -> None:
    data = make_film(48)
    facts, segments = prepare(data, config, MediaOptions(fps=2.0))
    assert facts.frame_indices == numbers(facts, segments) == [0, 16, 31, 47]
    facts, segments = prepare(data, config, MediaOptions(max_frames=5))
    assert facts.frame_indices == numbers(facts, segments) == [0, 12, 24, 35, 47]
    assert facts.grids == [(4, 12, 14), (1, 12, 14)]


def test_what_decord_refuses_goes_to_pyav(config: EncoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(path: str, header: FilmHeader, indices: list[int]) -> Iterator[tuple[int, Frame]]:
        asked.append(indices)
        raise film_decord.DecordFailed

    monkeypatch.setattr(film_decord, "frames", refuse)
    facts, segments = prepare(make_film(12), config)
    assert numbers(facts, segments) == list(range(12))
    assert asked == [list(range(12))]


def test_decord_is_checked_for_what_it_delivers() -> None:
    data = make_film(12)
    header = header_of(data)
    with pytest.raises(film_decord.DecordFailed, match=r"12 frames instead of 13"):
        by_decord(data, replace(header, num_frames=13), [0])
    with pytest.raises(film_decord.DecordFailed, match=r"frames of shape"):
        by_decord(data, replace(header, width=190), [0])
    narrow = make_film(12, size=(96, 160))
    with pytest.raises(film_decord.DecordFailed):
        by_decord(narrow, header_of(narrow), [0, 11])


def test_m23_sampled_frames_are_limited_before_decoding(config: EncoderConfig) -> None:
    data = make_film(48)
    limits = DecodeLimits(max_sampled_frames=16)
    assert len(prepare(data, config, MediaOptions(), limits)[0].frame_indices) == 16
    with pytest.raises(LimitExceeded, match=r"^film of 17 sampled frames, limit 16$"):
        prepare(data, config, MediaOptions(fps=8.5), limits)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (DecodeLimits(max_pixels=192 * 160 - 1), "film of 192x160 pixels, limit 30719"),
        (DecodeLimits(max_walked_frames=47), "film of 48 frames, limit 47"),
        (DecodeLimits(max_film_duration_s=1.0), "film of 2 s, limit 1 s"),
        (DecodeLimits(max_patches=12 * 14 * 48 - 1), "film of 8064 patches, limit 8063"),
    ],
)
def test_limits_hold_before_decoding(limits: DecodeLimits, message: str, config: EncoderConfig) -> None:
    with pytest.raises(LimitExceeded, match=f"^{message}$"):
        prepare(make_film(48), config, limits=limits)


def test_frames_are_counted_where_no_header_tells(config: EncoderConfig) -> None:
    with pytest.raises(LimitExceeded, match=r"^film of more than 40 frames$"):
        prepare(make_film(48, container="mpegts"), config, limits=DecodeLimits(max_walked_frames=40))


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_m28_one_frame_is_one_segment(container: str, config: EncoderConfig) -> None:
    facts, segments = prepare(make_film(1, container=container), config, MediaOptions())
    assert facts.grids == [(1, 12, 14)]
    assert numbers(facts, segments) == facts.frame_indices == [0]
    assert (facts.start_s, facts.timestamps) == ([0.0], ["00:00:00.000"])


def test_m29_a_short_film_gives_one_frame(config: EncoderConfig) -> None:
    facts, _ = prepare(make_film(5, fps=30), config, MediaOptions(fps=2.0))
    assert facts.frame_indices == [0]


CUT: dict[str, tuple[dict[str, Any], float]] = {
    "mp4_index_first": ({"container_options": {"movflags": "faststart"}}, 0.6),
    "fragmented": (
        {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "codec_options": {"g": "12"}},
        0.5,
    ),
    "avi": ({"container": "avi", "codec": "mpeg4"}, 0.5),
}


@pytest.mark.parametrize("name", CUT)
def test_m31_m34_a_cut_film_is_corrupt(name: str, config: EncoderConfig) -> None:
    how, kept = CUT[name]
    data = make_film(48, **how)
    with pytest.raises(CorruptMedia, match=r"^\d+ of \d+ sampled frames decoded$"):
        prepare(data[: int(len(data) * kept)], config)


@pytest.mark.parametrize("name", CUT)
def test_m31_the_true_frames_of_a_cut_film_on_request(name: str, config: EncoderConfig) -> None:
    how, kept = CUT[name]
    data = make_film(48, **how)
    cut = data[: int(len(data) * kept)]
    facts, segments = prepare(cut, config, replace(ALL, allow_partial=True))
    assert 4 <= len(facts.frame_indices) < 40
    assert numbers(facts, segments) == facts.frame_indices
    assert facts.start_s == [index / 24 for index in facts.frame_indices[::4]]


@pytest.mark.parametrize("container", ["matroska", "mpegts"])
def test_m31_containers_without_a_count_give_what_is_there(container: str, config: EncoderConfig) -> None:
    data = make_film(48, container=container, codec_options={"bf": "0"})
    facts, segments = prepare(data[: len(data) // 2], config)
    assert 8 <= len(facts.frame_indices) < 40
    assert numbers(facts, segments) == facts.frame_indices == list(range(len(facts.frame_indices)))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_that_lean_on_damage_are_not_taken(container: str, config: EncoderConfig) -> None:
    """Noise amid the packets: an error or a concealed picture, neither of which is a true frame."""
    options = {"movflags": "faststart"} if container == "mp4" else {}
    data = bytearray(make_film(48, container=container, container_options=options, codec_options={"g": "12"}))
    at = data.index(b"mdat") + 1200 if container == "mp4" else len(data) // 2
    data[at : at + 60] = bytes((7 * n + 3) % 251 for n in range(60))
    facts, segments = prepare(bytes(data), config, replace(ALL, allow_partial=True))
    assert 0 < len(facts.frame_indices) < 48
    assert numbers(facts, segments) == facts.frame_indices


def test_an_edit_list_hides_frames(config: EncoderConfig) -> None:
    data = remux(make_film(48, codec_options={"bf": "0", "g": "48"}), "mp4", start=12)
    assert header_of(data).not_for_decord == "edit list"
    facts, segments = prepare(data, config)
    assert facts.frame_indices == list(range(36))
    assert numbers(facts, segments) == list(range(12, 48))


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_m32_the_display_matrix_is_applied_by_both(rotation: int, config: EncoderConfig) -> None:
    data = make_film(6, rotation=rotation)
    header = header_of(data)
    size = (160, 192) if rotation != 180 else (192, 160)
    assert header.turned_size == size
    assert header.not_for_decord is None
    one, other = by_decord(data, header, [0, 5]), by_pyav(data, header, [0, 5])
    for index in (0, 5):
        assert np.array_equal(one[index], other[index])
        assert one[index].shape == (size[1], size[0], 3)
        assert read_number(np.rot90(one[index], -rotation // 90)) == index
    assert prepare(data, config)[0].original_size == size


def test_m32_a_slanted_film_is_refused(config: EncoderConfig) -> None:
    with pytest.raises(UnsupportedMedia, match=r"^film turned by 45 degrees, allowed: multiples of 90$"):
        prepare(make_film(3, rotation=45), config)


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_a_film_that_changes_its_size_is_refused(codec: str, config: EncoderConfig) -> None:
    data = change_size("webm", codec)
    assert header_of(data).not_for_decord == "frame parameters change"
    with pytest.raises(UnsupportedMedia, match=r"change their size from 192x160 to 256x192 pixels$"):
        prepare(data, config)


def test_a_large_film_is_resized_frame_by_frame(config: EncoderConfig) -> None:
    size = (448, 336)
    small = replace(config, media=replace(config.media, in_patch_limit_each_frame=192))
    facts, segments = prepare(make_film(8, size=size), small)
    assert facts.original_size == size
    assert facts.resized_size == (224, 168)
    expected = by_pyav(make_film(8, size=size), header_of(make_film(8, size=size)), [0, 1, 2, 3])
    assert segments[0].pixel_values.equal(preprocess_frames(np.stack(list(expected.values())), small).pixel_values)


def test_codecs_and_streams_outside_the_list_are_refused(config: EncoderConfig) -> None:
    with pytest.raises(UnsupportedMedia, match=r"^film with prores codec, allowed: h264, hevc, vp8"):
        prepare(make_film(3, container="mov", codec="prores_ks", pix_fmt="yuv422p10le"), config)
    with pytest.raises(UnsupportedMedia, match=r"^a still picture \(GIF\) sent as a film$"):
        prepare(make_film(1, container="gif", codec="gif", pix_fmt="rgb8"), config)


def test_playlists_open_nothing(config: EncoderConfig, tmp_path: Any) -> None:
    """They never pass the sniffing; were they to, PyAV would still refuse them."""
    (tmp_path / "secret.mp4").write_bytes(make_film(3))
    for text in (
        f"ffconcat version 1.0\nfile {tmp_path}/secret.mp4\n",
        f"#EXTM3U\n#EXTINF:1,\n{tmp_path}/secret.mp4\n",
    ):
        with pytest.raises(CorruptMedia, match=r"^film whose header does not read$"):
            prepare(text.encode(), config)


def test_a_film_that_may_be_a_manifest_is_kept_from_decord(config: EncoderConfig) -> None:
    """FFmpeg finds `<MPD` anywhere before a zero byte; here it stands in an unused element of Matroska's header."""
    data = make_film(12, container="matroska")
    size_length = 8 if data[4] == 0x01 else 1
    size = int.from_bytes(data[4 : 4 + size_length], "big") & (0x7F if size_length == 1 else (1 << 56) - 1)
    body = data[4 + size_length : 4 + size_length + size]
    text = b"<MPD dash:profile:isoff-live:2011>"
    body = b"\xec" + bytes([0x80 | len(text)]) + text + body
    crafted = data[:4] + (0x4000 | len(body)).to_bytes(2, "big") + body + data[4 + size_length + size :]
    assert header_of(crafted).not_for_decord == "markup"
    facts, segments = prepare(crafted, config)
    assert numbers(facts, segments) == list(range(12))


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x18ftypisom" + bytes(400), b"\x1a\x45\xdf\xa3" + bytes(400)])
def test_a_film_without_content_is_corrupt(data: bytes, config: EncoderConfig) -> None:
    with pytest.raises((CorruptMedia, UnsupportedMedia)):
        prepare(data, config)


@pytest.mark.parametrize(
    ("codec", "extradata", "kind"), [("h264", bytes([1] * 4 + [0xFF]), 0x67), ("hevc", bytes(21) + b"\x03", 0x42)]
)
def test_parameter_sets_in_key_frames_are_found(codec: str, extradata: bytes, kind: int) -> None:
    def unit(body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + body

    first, other = bytes([kind, 1, 2]), bytes([kind, 1, 3])
    delimiter, slices = bytes([0x09, 0xF0]), bytes([0x26, 0x01]) + bytes(20)
    packet = unit(delimiter) + unit(first) + unit(slices)
    assert frame_parameters(codec, extradata, packet) == first
    assert frame_parameters(codec, extradata, packet.replace(first, other)) == other
    assert frame_parameters(codec, extradata, unit(slices)) == b""
    assert frame_parameters(codec, None, packet) == b""


def test_the_bundled_samples(config: EncoderConfig) -> None:
    clip = (SAMPLES / "clip.mp4").read_bytes()
    assert len(clip) < 150_000
    facts, _ = prepare(clip, config, MediaOptions())
    assert (facts.original_size, len(facts.frame_indices)) == ((320, 180), 32)
    photo = (SAMPLES / "photo.jpg").read_bytes()
    assert len(photo) < 150_000
    assert prepare_picture(photo, "JPEG", MediaOptions(), LIMITS, config).original_size == (1024, 768)


def test_the_blocks_carry_their_number() -> None:
    assert [read_number(numbered_frame(n, 192, 160)) for n in (0, 1, 1365, 4095)] == [0, 1, 1365, 4095]
