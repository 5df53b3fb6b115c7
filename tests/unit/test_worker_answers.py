"""What a worker that was taken over may say: nothing of it is executed, and none of it breaks the service."""

import asyncio
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from app.decode.duty import duty_of
from app.decode.facts import BadAnswer, Facts, dump_facts, load_facts
from app.decode.media import DecodeLimits, MediaOptions, Prepared
from app.decode.memory_files import ResultFile, write_all
from app.decode.messages import Result, dump_refusal, dump_result, load_answer, load_ready
from app.decode.template_process import TemplateProcess
from app.decode.worker_process import WorkerProcess
from app.decode.workers import Workers
from app.errors import CorruptMedia, LimitExceeded
from encoder import EncoderConfig, load_config

CONFIG: EncoderConfig = load_config("demo:k3-tiny")
LIMITS = DecodeLimits()
DUTY = duty_of("image", LIMITS, CONFIG)
PATCH_BYTES = 3 * 14 * 14
PICTURE = Facts([(1, 2, 2)], (28, 28), (28, 28), None, None, None, 0.1, 0.2)
FILM = Facts([(4, 2, 2), (1, 2, 2)], (28, 28), (28, 28), [0, 1, 2, 3, 9], [0.0, 0.5], ["0.0", "0.5"], 0.1, 0.2)


def changed(facts: Facts, **fields: Any) -> bytes:
    return json.dumps(json.loads(dump_facts(facts)) | fields).encode()


def load(text: bytes, num_patches: int = 4) -> Facts:
    return load_facts(text, num_patches * PATCH_BYTES, 14, LIMITS)


def test_good_facts_come_through() -> None:
    assert load(dump_facts(PICTURE)) == PICTURE
    assert load(dump_facts(FILM), 20) == FILM


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"1" * 10_000,
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        pickle.dumps(PICTURE),
        changed(PICTURE, more=1),
        changed(PICTURE, grids=[]),
        changed(PICTURE, grids=[[1, 2]]),
        changed(PICTURE, grids=[[1, 2, 3]]),
        changed(PICTURE, grids=[[1, 2, 2.0]]),
        changed(PICTURE, grids=[[True, 2, 2]]),
        changed(PICTURE, grids=[[-1, -2, 2]]),
        changed(PICTURE, grids=[[1, 1 << 60, 1 << 60]]),
        changed(PICTURE, grids=[[1, 1, 2], [1, 1, 2]]),
        changed(PICTURE, grids="122"),
        changed(PICTURE, original_size=[28]),
        changed(PICTURE, original_size=[0, 28]),
        changed(PICTURE, original_size=[28, 1 << 40]),
        changed(PICTURE, resized_size=["28", "28"]),
        changed(PICTURE, decode_s=float("nan")),
        changed(PICTURE, decode_s=float("inf")),
        changed(PICTURE, preprocess_s="1"),
        changed(PICTURE, start_s=[0.0]),
        changed(PICTURE, deferred=[]),
    ],
)
def test_other_facts_are_refused(text: bytes) -> None:
    with pytest.raises(BadAnswer):
        load(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"frame_indices": [0, 1, 2, 3]},
        {"frame_indices": [0, 1, 2, 3, -1]},
        {"frame_indices": [0, 1, 2, 3, 36_001]},
        {"start_s": [0.0]},
        {"start_s": None},
        {"timestamps": ["0.0", "0" * 100]},
        {"timestamps": ["0.0", "\x1b[31m"]},
        {"timestamps": ["0.0", "\u202e"]},
        {"timestamps": ["0.0", 1]},
        {"deferred": {"mode": "RGB"}},
    ],
)
def test_other_facts_of_films_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        load(changed(FILM, **fields), 20)


def test_pixels_must_be_as_many_as_the_grids_say() -> None:
    for num_patches in (3, 5):
        with pytest.raises(BadAnswer, match="bytes of pixels for 4 patches"):
            load(dump_facts(PICTURE), num_patches)


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"[" * 60_000,
        b"7",
        b"{}",
        pickle.dumps(1),
        json.dumps({"error": "SystemExit", "text": "x"}).encode(),
        json.dumps({"error": "CorruptMedia", "text": "x" * 501}).encode(),
        json.dumps({"error": "CorruptMedia", "text": 7}).encode(),
        dump_result(Result(0, 10)),
        dump_result(Result(10, 0)),
        dump_result(Result(-10, 10)),
        dump_result(Result(10, 1 << 40)),
        dump_result(Result(1 << 40, 10)),
        json.dumps({"pixel_bytes": 10.5, "facts_bytes": 10}).encode(),
    ],
)
def test_other_answers_are_refused(message: bytes) -> None:
    with pytest.raises(BadAnswer):
        load_answer(message, DUTY)


def test_refusals_come_through_without_what_a_terminal_obeys() -> None:
    with pytest.raises(LimitExceeded, match=r"^too large\?\[31m\?$"):
        load_answer(dump_refusal(LimitExceeded("too large\x1b[31m\u202e")), DUTY)
    with pytest.raises(BadAnswer):
        load_ready(b"ready")


def answering(
    answer: bytes, content: bytes, monkeypatch: pytest.MonkeyPatch, reasons: list[str]
) -> Callable[[], "asyncio.Future[Prepared] | Any"]:
    """A pool with a worker that writes `content` and answers `answer`, whatever it is asked."""

    async def introduce(self: WorkerProcess, introduction: object) -> dict[str, str]:
        return {}

    async def ask(self: WorkerProcess, job: bytes, data: bytes, result: ResultFile) -> bytes:
        write_all(result.descriptor, content, 0)
        return answer

    monkeypatch.setattr(WorkerProcess, "introduce", introduce)
    monkeypatch.setattr(WorkerProcess, "ask", ask)
    monkeypatch.setattr(WorkerProcess, "is_alive", True)
    monkeypatch.setattr(TemplateProcess, "fork", lambda *_: None)
    workers = Workers("image", 1, LIMITS, CONFIG, TemplateProcess(), reasons.append)

    async def prepare() -> Prepared:
        await workers.start()
        try:
            return await workers.prepare(b"", "PNG", MediaOptions())
        finally:
            await workers.close()

    return prepare


GOOD = dump_facts(PICTURE)
PIXELS = bytes(4 * PATCH_BYTES)


async def test_a_result_is_read_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = dump_result(Result(len(PIXELS), len(GOOD)))
    prepared = await answering(answer, PIXELS + GOOD, monkeypatch, [])()
    assert prepared.segments[0].grid_thw == (1, 2, 2)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (dump_result(Result(len(PIXELS), len(GOOD))), PIXELS),  # the file is shorter
        (dump_result(Result(len(PIXELS), len(GOOD) - 1)), PIXELS + GOOD),
        (dump_result(Result(len(PIXELS) + 1, len(GOOD) - 1)), PIXELS + GOOD),
        (
            dump_result(Result(2352, len(changed(PICTURE, deferred={"mode": "RGB"})))),
            bytes(2352) + changed(PICTURE, deferred={"mode": "RGB"}),
        ),
        (b"nonsense", b""),
    ],
)
async def test_a_worker_that_answers_nonsense_costs_its_picture_and_goes(
    answer: bytes, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []
    with pytest.raises(CorruptMedia, match=r"^picture that crashed its decoder$"):
        await answering(answer, content, monkeypatch, reasons)()
    assert reasons == ["failed"]
    assert "did not answer as our decoders do" in caplog.text


def test_a_result_cannot_be_cut_short_under_its_reader() -> None:
    file = ResultFile()
    write_all(file.descriptor, PIXELS, 0)
    mapped = file.mapped(len(PIXELS))
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)
    assert mapped[len(PIXELS) - 1] == 0
    with pytest.raises(ValueError, match="shorter"):
        file.mapped(len(PIXELS) + 1)
