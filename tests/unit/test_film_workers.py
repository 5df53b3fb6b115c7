"""The decoder as the service uses it: a film that crashes, hangs or outgrows its worker costs only itself.

Row numbers (m25 ...) are those of the media cases.
"""

import asyncio
import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from app.decode import DecodeLimits, Decoder, MediaOptions, Prepared, film_decord
from app.decode import decoder as decoder_module
from app.decode.template_process import TemplateProcess
from app.errors import CorruptMedia, DeadlineExceeded, Draining, LimitExceeded, Starting, UnsupportedMedia
from encoder import EncoderConfig, SetupError, load_config
from tests.clips import frames_of, make_film, read_number

ROOT = Path(__file__).parents[2]
PLAIN = MediaOptions()

pytestmark = pytest.mark.usefixtures("shared_template")


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    return load_config("demo:k3-tiny")


@pytest.fixture(scope="module")
def film() -> bytes:
    return make_film(48)


@asynccontextmanager
async def decoder(config: EncoderConfig, num_workers: int = 1, **limits: float) -> AsyncIterator[Decoder]:
    made = Decoder(config, DecodeLimits(**limits), picture_workers=2, film_workers=num_workers)  # type: ignore[arg-type]
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def picture(width: int = 64, height: int = 48) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def gif(num_frames: int) -> bytes:
    frames = [Image.new("RGB", (60, 48), (80 * n, 0, 0)) for n in range(num_frames)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
    return buffer.getvalue()


def is_right(prepared: Prepared) -> bool:
    """Whether each frame of a prepared numbered film is the one that its index says."""
    shown = [read_number(f) for s in prepared.segments for f in frames_of(s, prepared.original_size)]
    return prepared.frame_indices == shown


def named_memory() -> set[str]:
    """Segments of shared memory that have a name and so could be left behind."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def about_process(pid: int, name: str) -> Path:
    return Path("/proc") / str(pid) / name


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.02)


async def stopped_while_it_works(made: Decoder, pid: int, film: bytes) -> "asyncio.Task[Prepared]":
    """A film given to a worker that stands still, as one that hangs would."""
    os.kill(pid, signal.SIGSTOP)
    job = asyncio.create_task(made.prepare(film, "video", PLAIN))
    await asyncio.sleep(0.1)
    assert not job.done()
    return job


async def test_the_bytes_decide(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        assert (await made.prepare(film, None, PLAIN)).kind == "video"
        assert (await made.prepare(picture(), None, PLAIN)).kind == "image"
        with pytest.raises(UnsupportedMedia, match=r"a film \(MP4\) sent as a picture"):
            await made.prepare(film, "image", PLAIN)
        with pytest.raises(UnsupportedMedia, match=r"a still picture \(JPEG\) sent as a film"):
            await made.prepare(picture(), "video", PLAIN)
        animation = gif(6)
        assert (await made.prepare(animation, None, PLAIN)).kind == "image"
        as_film = await made.prepare(animation, "video", PLAIN)
        assert (as_film.kind, as_film.original_size) == ("video", (60, 48))
        assert sum(s.grid_thw.t for s in as_film.segments) == len(as_film.frame_indices or []) == 5
        with pytest.raises(UnsupportedMedia, match=r"a still picture \(GIF\) sent as a film"):
            await made.prepare(gif(1), "video", PLAIN)
        with pytest.raises(UnsupportedMedia, match=r"^12 bytes that are no picture or film we read"):
            await made.prepare(bytes(range(100, 112)), "image", PLAIN)


async def test_a_film_arrives_as_it_was_prepared(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        prepared = await made.prepare(film, "video", PLAIN)
    assert is_right(prepared)
    assert len(prepared.frame_indices or []) == 16
    assert prepared.timestamps == ["00:00:00.000", "00:00:00.541", "00:00:01.041", "00:00:01.583"]
    assert [tuple(s.grid_thw) for s in prepared.segments] == [(4, 12, 14)] * 4
    assert prepared.original_size == prepared.resized_size == (192, 160)
    assert prepared.decode_s > 0
    assert prepared.preprocess_s > 0


async def test_m25_the_same_item_twenty_times(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config, num_workers=2) as made:
        films = await asyncio.gather(*(made.prepare(film, None, PLAIN) for _ in range(20)))
        pictures = await asyncio.gather(*(made.prepare(picture(), None, PLAIN) for _ in range(20)))
    for group in (films, pictures):
        for other in group[1:]:
            pairs = zip(group[0].segments, other.segments, strict=True)
            assert all(one.pixel_values.equal(two.pixel_values) for one, two in pairs)


async def test_m30_memory_does_not_grow_with_a_film(config: EncoderConfig) -> None:
    """Nine times as long: no more memory in the worker, and every bound holds."""
    gray = [np.full((90, 160, 3), 128, dtype=np.uint8)] * 5400
    quick = {"codec_options": {"preset": "ultrafast", "bf": "0"}, "size": (160, 90), "fps": 30}
    async with decoder(config, decord_batch_bytes=20 << 20) as made:  # holds the shorter one's frames only
        process = psutil.Process(made.pids("video")[0])
        peaks = []
        for num_frames in (600, 5400):
            data = make_film(num_frames, frames=gray[:num_frames], **quick)  # type: ignore[arg-type]
            job = asyncio.create_task(made.prepare(data, "video", PLAIN))
            peak = 0
            while not job.done():
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(0.01)
            assert len((await job).frame_indices or []) == num_frames * 8 // 30
            peaks.append(peak)
        assert peaks[1] < peaks[0] + 32e6
        with pytest.raises(LimitExceeded, match=r"^film of 2400 sampled frames, limit 2048$"):
            await made.prepare(data, "video", MediaOptions(fps=40 / 3))


async def test_m33_a_transport_stream_is_answered(config: EncoderConfig) -> None:
    async with decoder(config, film_deadline_s=20.0) as made:
        assert is_right(await made.prepare(make_film(150, container="mpegts"), "video", PLAIN))


async def test_m33_a_worker_that_hangs_is_replaced(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config, num_workers=2, film_deadline_s=1.0) as made:
        other, hung = made.pids("video")  # the last one is the next at work
        job = await stopped_while_it_works(made, hung, film)
        assert is_right(await made.prepare(film, "video", PLAIN))
        with pytest.raises(DeadlineExceeded, match=r"^film not decoded within 1 s$"):
            await job
        await until(lambda: not alive(hung) and len(made.pids("video")) == 2)
        assert other in made.pids("video")
        assert is_right(await made.prepare(film, "video", PLAIN))


async def test_m34_a_worker_that_crashes_costs_its_film_only(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        job = await stopped_while_it_works(made, pid, film)
        waiting = [asyncio.create_task(made.prepare(film, "video", PLAIN)) for _ in range(3)]
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(CorruptMedia, match=r"^film that crashed its decoder$"):
            await job
        assert all(is_right(prepared) for prepared in await asyncio.gather(*waiting))
        assert made.pids("video") != [pid]


async def test_a_film_whose_worker_the_kernel_killed_gets_another(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        job = await stopped_while_it_works(made, pid, film)
        os.kill(pid, signal.SIGKILL)
        assert is_right(await job)


async def test_a_film_whose_workers_the_kernel_kills_twice_is_refused(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config, num_workers=2) as made:
        pids = made.pids("video")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        job = asyncio.create_task(made.prepare(film, "video", PLAIN))
        await asyncio.sleep(0.1)
        for pid in reversed(pids):  # in the order in which they are at work
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
        with pytest.raises(CorruptMedia, match=r"^film that crashed its decoder$"):
            await job


async def test_workers_that_do_not_start(
    config: EncoderConfig, film: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoder_module, "TemplateProcess", TemplateProcess)
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        monkeypatch.setattr(sys, "executable", "/bin/false")
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)  # the template, and its workers with it
        await until(lambda: not alive(pid))
        for _ in range(2):
            with pytest.raises(Starting, match=r"^film decoders are restarting$"):
                await made.prepare(film, "video", PLAIN)
        assert "a film worker did not start" in caplog.text
        for executable in ("/bin/false", "/does/not/exist"):
            monkeypatch.setattr(sys, "executable", executable)
            with pytest.raises(SetupError, match=r"^a (film|picture) worker did not start$"):
                async with decoder(config):
                    pass
        monkeypatch.undo()
        assert is_right(await made.prepare(film, "video", PLAIN))


def test_a_worker_needs_no_place_to_write() -> None:
    script = """
        import os, tempfile
        from app.decode import worker

        def refuse():
            raise FileNotFoundError("No usable temporary directory found")

        tempfile.mkdtemp = refuse
        worker.stand_nowhere()
        assert os.getcwd() == f"/proc/{os.getpid()}/fdinfo"
        assert all(name.isdigit() for name in os.listdir())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True)


async def test_m34_a_cut_avi_is_a_client_error(config: EncoderConfig, film: bytes) -> None:
    data = make_film(48, container="avi", codec="mpeg4")
    async with decoder(config) as made:
        pids = made.pids("video")
        with pytest.raises(CorruptMedia, match=r"^\d+ of 16 sampled frames decoded$"):
            await made.prepare(data[: len(data) // 2], "video", PLAIN)
        assert is_right(await made.prepare(film, "video", PLAIN))
        assert made.pids("video") == pids


async def test_an_idle_worker_that_is_gone_is_replaced_before_the_next_film(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        assert is_right(await made.prepare(film, "video", PLAIN))


async def test_a_film_that_needs_too_much_memory_is_refused(config: EncoderConfig, film: bytes) -> None:
    large = make_film(2, size=(7680, 4320), codec_options={"preset": "ultrafast"})
    async with decoder(config, film_worker_memory_bytes=160 << 20) as made:
        with pytest.raises((LimitExceeded, CorruptMedia)):  # libraries differ in how they take a refused allocation
            await made.prepare(large, "video", PLAIN)
        assert is_right(await made.prepare(film, "video", PLAIN))


async def test_the_requests_deadline_counts_waiting(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        job = await stopped_while_it_works(made, pid, film)
        with pytest.raises(DeadlineExceeded, match=r"^not decoded before the request's deadline$"):
            await made.prepare(film, "video", PLAIN, timeout_s=0.2)
        os.kill(pid, signal.SIGCONT)
        assert is_right(await job)
        assert made.pids("video") == [pid]


async def test_a_client_that_leaves_frees_its_worker(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        job = await stopped_while_it_works(made, pid, film)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert is_right(await made.prepare(film, "video", PLAIN))
        assert not alive(pid)


async def test_m37_broken_films_leave_nothing_behind(config: EncoderConfig, film: bytes) -> None:
    """Damaged in many ways: only our errors, recycled workers, no more descriptors and no named memory."""
    chance = random.Random(0)
    films = [
        film,
        make_film(24, container="matroska"),
        make_film(24, container="webm", codec="libvpx-vp9"),
        make_film(24, container="avi", codec="mpeg4"),
        make_film(24, container="mpegts"),
        make_film(8, container="gif", codec="gif", pix_fmt="rgb8"),
    ]
    named = named_memory()
    async with decoder(config, film_worker_max_jobs=50) as made:
        await made.prepare(film, "video", PLAIN)
        first = made.pids("video")
        process = psutil.Process()
        num_descriptors = process.num_fds()
        refused = 0
        for data in films * 20:
            damaged = bytearray(data)
            for _ in range(chance.choice((1, 8, 40))):
                damaged[chance.randrange(12, len(data))] = chance.randrange(256)
            try:
                await made.prepare(bytes(damaged), "video", PLAIN)
            except (CorruptMedia, LimitExceeded, UnsupportedMedia):
                refused += 1
        assert 20 < refused < 120
        assert is_right(await made.prepare(film, "video", PLAIN))
        await until(lambda: len(made.pids("video")) == 1)
        assert made.pids("video") != first
        assert process.num_fds() <= num_descriptors + 2
    assert named_memory() <= named


async def test_m35_the_event_loop_stays_free(config: EncoderConfig, film: bytes) -> None:
    large = picture(3000, 2000)
    lags = []
    async with decoder(config) as made:

        async def poll() -> None:
            while True:
                asked = time.perf_counter()
                await asyncio.sleep(0.005)
                lags.append(time.perf_counter() - asked)

        polling = asyncio.create_task(poll())
        work: list[Awaitable[Prepared]] = [made.prepare(large, None, PLAIN) for _ in range(12)]
        work += [made.prepare(film, None, PLAIN) for _ in range(4)]
        started = time.perf_counter()
        await asyncio.gather(*work)
        assert time.perf_counter() - started > 0.3  # else there was nothing to be blocked by
        polling.cancel()
    assert sorted(lags)[-2] < 0.1


async def test_closing_ends_every_worker_and_refuses_films(config: EncoderConfig, film: bytes) -> None:
    async with decoder(config, num_workers=2) as made:
        pids = made.pids("video")
        job = await stopped_while_it_works(made, pids[-1], film)
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(Draining):
        await job
    with pytest.raises(Draining):
        await made.prepare(film, "video", PLAIN)


def test_workers_die_with_the_service_however_it_dies() -> None:
    script = """
        import asyncio, json
        from app.decode import DecodeLimits, Decoder
        from encoder import load_config

        async def main():
            made = Decoder(load_config("demo:k3-tiny"), DecodeLimits(), picture_workers=1, film_workers=1)
            await made.start()
            print(json.dumps(made.pids("video")), flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        (pid,) = json.loads(service.stdout.readline())
        worker = psutil.Process(pid)
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches whole process groups; a worker leaves it to the service
        assert worker.is_running()
        service.kill()
    worker.wait(10)


async def test_a_worker_stands_alone(config: EncoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONVIT_API_KEY", "secret")
    async with decoder(config) as made:
        (pid,) = made.pids("video")
        assert b"secret" not in about_process(pid, "environ").read_bytes()
        assert about_process(pid, "cwd").readlink().name.endswith(" (deleted)")
        assert psutil.Process(pid).net_connections() == []


@pytest.mark.parametrize(
    ("installed", "message"),
    [({"decord", "decord2"}, "uninstall it"), (set(), "decord2 is not installed")],
)
async def test_the_wrong_decord_stops_the_start(
    installed: set[str], message: str, config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(film_decord, "_is_installed", lambda name: name in installed)
    with pytest.raises(SetupError, match=message):
        async with decoder(config):
            pass
