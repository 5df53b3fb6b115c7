"""Pictures in their workers: whatever one does to its decoder costs itself only. Row numbers are of the media cases."""

import asyncio
import io
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from app.decode import DecodeLimits, Decoder, Jobs, MediaOptions, Prepared
from app.decode.picture import prepare_picture
from app.decode.sniff import sniff
from app.errors import CorruptMedia, DeadlineExceeded, Draining, LimitExceeded
from encoder import EncoderConfig, defer_image, load_config, pack, preprocess_image
from tests.unit.test_film_workers import alive, until

GOLDEN_PICTURES = Path(__file__).parents[1] / "golden/preprocess/images"
PLAIN = MediaOptions()
TURNED = MediaOptions(apply_exif_orientation=True)
CONFIG: EncoderConfig = load_config("demo:k3-tiny")

pytestmark = pytest.mark.usefixtures("shared_template")


@asynccontextmanager
async def decoder(num_workers: int = 1, restarts: list[str] | None = None, **limits: float) -> AsyncIterator[Decoder]:
    def on_restart(kind: str, reason: str) -> None:
        if restarts is not None:
            restarts.append(f"{kind} {reason}")

    made = Decoder(
        CONFIG,
        DecodeLimits(**limits),  # type: ignore[arg-type]
        picture_workers=num_workers,
        film_workers=1,
        on_worker_restart=on_restart,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, picture_format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, picture_format, **options)
    return buffer.getvalue()


def avif_with_hidden_frames(num_frames: int) -> bytes:
    """An AVIF of 1500x1500 whose one picture is coded so many times: its header says nothing of that."""
    data = saved(noise(60, 60).resize((1500, 1500)), "AVIF", quality=30, speed=10)
    box = data.index(b"iloc") + 4
    assert data[box : box + 8] == bytes.fromhex("0000000044000001"), "another layout of the box"
    length_at, media_at = box + 18, data.index(b"mdat")
    start, length = (int.from_bytes(data[at : at + 4], "big") for at in (length_at - 4, length_at))
    made = bytearray(data[:start] + data[start : start + length] * num_frames + data[start + length :])
    made[length_at : length_at + 4] = (length * num_frames).to_bytes(4, "big")
    made[media_at - 4 : media_at] = (len(made) - media_at + 4).to_bytes(4, "big")
    return bytes(made)


def same(one: Prepared, other: Prepared) -> bool:
    pairs = zip(one.segments, other.segments, strict=True)
    return (one.original_size, one.resized_size) == (other.original_size, other.resized_size) and all(
        a.grid_thw == b.grid_thw and a.pixel_values.equal(b.pixel_values) for a, b in pairs
    )


async def stopped_at_a_picture(made: Decoder, pid: int) -> "asyncio.Task[Prepared]":
    """A picture given to a worker that stands still, as one that hangs would."""
    os.kill(pid, signal.SIGSTOP)
    job = asyncio.create_task(made.prepare(saved(noise(64, 48)), None, PLAIN))
    await until(lambda: made.jobs("image").running == 1)
    return job


async def test_every_kind_of_picture_arrives_as_it_was_prepared() -> None:
    """All that Pillow imports late, or wants to write or start, would fail in there."""
    files = [path.read_bytes() for path in sorted(GOLDEN_PICTURES.glob("*"))]
    for picture_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF", "MPO"):
        files.append(saved(noise(45, 31), picture_format))
        exif = Image.Exif()
        exif[0x0112] = 6
        if picture_format in ("JPEG", "PNG", "WEBP", "AVIF"):
            files.append(saved(noise(45, 31), picture_format, exif=exif))
    more = {"save_all": True, "append_images": [noise(45, 31, "L")]}
    files += [saved(noise(45, 31), each, **more) for each in ("GIF", "WEBP", "PNG", "MPO")]
    files += [saved(noise(3000, 2000), each) for each in ("JPEG", "WEBP", "AVIF")]  # large enough for threads
    async with decoder() as made:
        for data in files:
            for options in (PLAIN, TURNED):
                here = prepare_picture(data, sniff(data).format, options, DecodeLimits(), CONFIG)
                assert same(await made.prepare(data, None, options), here)
        assert made.jobs("image") == Jobs(0, 0)


async def test_pictures_are_left_to_the_device_where_it_takes_them() -> None:
    pictures = [noise(45, 31), noise(4000, 3800), noise(50, 40, "P"), noise(50, 40, "LA"), noise(50, 40, "CMYK")]
    formats = ["JPEG", "PNG", "GIF", "PNG", "JPEG"]
    async with decoder() as made:
        made.defers_preprocessing = True
        for image, picture_format in zip(pictures, formats, strict=True):
            data = saved(image, picture_format)
            file = Image.open(io.BytesIO(data))
            prepared = await made.prepare(data, None, PLAIN)
            (segment,) = prepared.segments
            expected = defer_image(file, CONFIG)
            assert segment.picture is not None
            assert expected.picture is not None
            assert segment.picture.facts() == expected.picture.facts()
            assert np.array_equal(segment.picture.pixels, expected.picture.pixels)
            assert segment.grid_thw == preprocess_image(file, CONFIG).grid_thw
            assert prepared.original_size == image.size
            assert pack([segment], CONFIG).num_tokens


async def test_results_stay_as_they_are_while_others_are_decoded() -> None:
    """Their memory is used again, but only once nobody looks at it."""
    pictures = [saved(noise(64 + 28 * i, 48)) for i in range(12)]
    expected = [prepare_picture(data, "JPEG", PLAIN, DecodeLimits(), CONFIG) for data in pictures]
    async with decoder() as made:
        for _ in range(3):
            held = [await made.prepare(data, None, PLAIN) for data in pictures]
            assert all(same(*pair) for pair in zip(held, expected, strict=True))
            kept = held[0].segments[0].pixel_values[3:]
            del held
            await made.prepare(pictures[-1], None, PLAIN)
            assert kept.equal(expected[0].segments[0].pixel_values[3:])
    assert kept.equal(expected[0].segments[0].pixel_values[3:])


async def test_a_hidden_layer_does_not_outlast_the_deadline() -> None:
    """The decoder is in native code and never looks up; only its end ends it."""
    restarts: list[str] = []
    lags = []
    data = avif_with_hidden_frames(2000)
    async with decoder(2, restarts, picture_deadline_s=1.0) as made:

        async def poll() -> None:
            while True:
                asked = time.perf_counter()
                await asyncio.sleep(0.005)
                lags.append(time.perf_counter() - asked)

        polling = asyncio.create_task(poll())
        slow = asyncio.create_task(made.prepare(data, None, PLAIN))
        await until(lambda: made.jobs("image").running == 1)
        assert (await made.prepare(saved(noise(64, 48)), None, PLAIN)).original_size == (64, 48)
        assert not slow.done()
        with pytest.raises(DeadlineExceeded, match=r"^picture not decoded within 1 s$"):
            await slow
        polling.cancel()
        await until(lambda: len(made.pids("image")) == 2)
        assert made.jobs("image") == Jobs(0, 0)
    assert restarts == ["image deadline"]
    assert sorted(lags)[-2] < 0.1
    assert len(lags) > 50


async def test_the_kernel_ends_a_picture_too_where_the_service_cannot() -> None:
    """A limit on CPU time holds while the service is stopped or busy."""
    restarts: list[str] = []
    async with decoder(1, restarts) as made:
        workers = made._workers["image"]
        (pid,) = made.pids("image")
        await made.prepare(saved(noise(64, 48)), None, PLAIN)
        (limit,) = re.findall(r"Max cpu time +(\d+)", (Path("/proc") / str(pid) / "limits").read_text())
        assert workers._duty.cpu_s <= int(limit) <= workers._duty.cpu_s + 3
        job = await stopped_at_a_picture(made, pid)
        os.kill(pid, signal.SIGXCPU)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(DeadlineExceeded, match=r"^picture not decoded within 35 s of CPU time$"):
            await job
    assert restarts == ["image deadline"]


async def test_a_crash_costs_its_picture_only() -> None:
    restarts: list[str] = []
    async with decoder(1, restarts) as made:
        (pid,) = made.pids("image")
        job = await stopped_at_a_picture(made, pid)
        waiting = [asyncio.create_task(made.prepare(saved(noise(64, 48)), None, PLAIN)) for _ in range(3)]
        await until(lambda: made.jobs("image") == Jobs(1, 3))
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(CorruptMedia, match=r"^picture that crashed its decoder$"):
            await job
        assert all(prepared.original_size == (64, 48) for prepared in await asyncio.gather(*waiting))
        assert not alive(pid)
    assert restarts == ["image crashed"]


async def test_a_picture_whose_worker_the_kernel_killed_gets_another() -> None:
    async with decoder() as made:
        (pid,) = made.pids("image")
        job = await stopped_at_a_picture(made, pid)
        os.kill(pid, signal.SIGKILL)
        assert (await job).original_size == (64, 48)


async def test_a_picture_whose_workers_template_is_killed_gets_another() -> None:
    async with decoder() as made:
        (pid,) = made.pids("image")
        job = await stopped_at_a_picture(made, pid)
        psutil.Process(pid).parent().kill()  # the kernel ends its workers with it
        assert (await job).original_size == (64, 48)


async def test_an_idle_worker_keeps_no_large_item() -> None:
    large = saved(noise(2000, 2000), "PNG")
    assert len(large) > 8 << 20
    async with decoder() as made:
        (worker,) = made._workers["image"]._workers
        await made.prepare(large, "image", PLAIN)
        assert os.fstat(worker.input.descriptor).st_size == 0
        await made.prepare(saved(noise(64, 48)), "image", PLAIN)
        assert 0 < os.fstat(worker.input.descriptor).st_size < 8 << 20


async def test_a_picture_that_nobody_waits_for_ends_with_its_worker() -> None:
    restarts: list[str] = []
    async with decoder(1, restarts) as made:
        (pid,) = made.pids("image")
        job = await stopped_at_a_picture(made, pid)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert (await made.prepare(saved(noise(64, 48)), None, PLAIN)).original_size == (64, 48)
        assert not alive(pid)
    assert restarts == ["image cancelled"]


async def test_a_picture_that_needs_too_much_memory_is_refused() -> None:
    restarts: list[str] = []
    async with decoder(1, restarts, picture_worker_memory_bytes=64 << 20) as made:
        with pytest.raises(
            LimitExceeded, match=r"^picture that needs too much memory to decode, limit 67108864 bytes$"
        ):
            await made.prepare(saved(noise(100, 100).resize((6000, 5000)), "PNG", compress_level=1), None, PLAIN)
        assert (await made.prepare(saved(noise(64, 48)), None, PLAIN)).original_size == (64, 48)
    assert restarts == []


async def test_films_and_pictures_do_not_wait_for_each_other() -> None:
    async with decoder() as made:
        os.kill(made.pids("video")[0], signal.SIGSTOP)
        film = asyncio.create_task(made.prepare(saved(noise(40, 30), "GIF", save_all=True, append_images=[
            noise(40, 30).rotate(180)]), "video", PLAIN))  # fmt: skip
        await until(lambda: made.jobs("video").running == 1)
        assert (await made.prepare(saved(noise(64, 48)), None, PLAIN)).kind == "image"
        assert not film.done()
        os.kill(made.pids("video")[0], signal.SIGCONT)
        assert (await film).kind == "video"


async def test_workers_are_replaced_after_their_number_of_pictures() -> None:
    restarts: list[str] = []
    async with decoder(1, restarts, picture_worker_max_jobs=3) as made:
        first = made.pids("image")
        for _ in range(7):
            await made.prepare(saved(noise(64, 48)), None, PLAIN)
        assert made.pids("image") != first
    assert restarts == ["image planned", "image planned"]


async def test_descriptors_and_processes_come_back() -> None:
    async with decoder(2) as made:
        await made.prepare(saved(noise(64, 48)), None, PLAIN)
        process = psutil.Process()
        before = process.num_fds()
        for _ in range(10):
            pids = made.pids("image")
            os.kill(pids[0], signal.SIGSTOP)  # whichever of them gets it
            job = await stopped_at_a_picture(made, pids[1])
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            for pid in made.pids("image"):
                os.kill(pid, signal.SIGCONT)
            await until(lambda: len(made.pids("image")) == 2 and not made._workers["image"]._renewals)
        assert process.num_fds() <= before + 2
        pids = made.pids("image")
    assert not any(alive(pid) for pid in pids)


async def test_closing_ends_pictures_and_refuses_them() -> None:
    async with decoder() as made:
        job = await stopped_at_a_picture(made, made.pids("image")[0])
        waiting = asyncio.create_task(made.prepare(saved(noise(64, 48)), None, PLAIN))
        await until(lambda: made.jobs("image").waiting == 1)
        started = time.perf_counter()
    assert time.perf_counter() - started < 2
    for each in (job, waiting):
        with pytest.raises(Draining):
            await each
    with pytest.raises(Draining):
        await made.prepare(saved(noise(64, 48)), None, PLAIN)


async def test_the_requests_deadline_ends_a_picture() -> None:
    async with decoder() as made:
        os.kill(made.pids("image")[0], signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match=r"^not decoded before the request's deadline$"):
            await made.prepare(saved(noise(64, 48)), None, PLAIN, timeout_s=0.2)
        assert (await made.prepare(saved(noise(64, 48)), None, PLAIN)).original_size == (64, 48)


async def test_the_template_has_one_thread_and_workers_hold_nothing_of_each_other() -> None:
    async with decoder(3) as made:
        await made.prepare(saved(noise(64, 48)), None, PLAIN)
        pids = made.pids("image") + made.pids("video")
        (template,) = {psutil.Process(pid).ppid() for pid in pids}
        assert psutil.Process(template).num_threads() == 1
        for pid in pids:
            links = [link.readlink().name for link in (Path("/proc") / str(pid) / "fd").iterdir()]
            assert sum(link.startswith("socket:") for link in links) == 1
            assert not any(link.startswith("anon_inode:[pidfd]") for link in links)
            assert len(links) <= 6  # standard ones, its channel, the input, and the result at times


async def test_the_worker_that_was_at_work_last_is_next() -> None:
    async with decoder(3) as made:
        for _ in range(4):
            await made.prepare(saved(noise(28, 28)), "image", PLAIN)
        jobs = [worker.num_jobs for worker in made._workers["image"]._workers]
        assert sorted(jobs) == [0, 0, 4]
        for _ in range(20):  # three at a time, unless one is done before the next begins
            await asyncio.gather(*(made.prepare(saved(noise(280, 280)), "image", PLAIN) for _ in range(3)))
        assert all(worker.num_jobs for worker in made._workers["image"]._workers)  # the others are there for the rest


async def test_a_place_without_a_worker_is_taken_last() -> None:
    async with decoder(2) as made:
        places = made._workers["image"]._idle
        taken = [await places.get(), await places.get()]
        for each in (taken[0], None, taken[1]):
            places.put_nowait(each)
        assert [places.get_nowait() for _ in range(3)] == [taken[1], taken[0], None]
        for each in taken:
            places.put_nowait(each)
