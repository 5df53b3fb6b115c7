"""The measuring tools themselves: what they count, and that they notice what is wrong."""

import asyncio
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import machine, service
from benchmarks.async_client import Answer, Connections, difference, embeddings
from benchmarks.clients import Connection, Tally, drive, request_bytes
from benchmarks.open_loop import Callers
from benchmarks.pictures import jpeg
from benchmarks.plain_server import Requests
from benchmarks.running import difference as gained_between
from benchmarks.running import free_port, percentile, wait_until_listening
from tests.raw_server import response, serve


def safetensors(values: np.ndarray) -> bytes:
    entry = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
    head = json.dumps({"embeddings": entry}).encode()
    return struct.pack("<Q", len(head)) + head + values.tobytes()


class TestNumbers:
    def test_percentile_is_a_value_that_was_measured(self) -> None:
        values = [float(n) for n in range(100, 0, -1)]
        assert [percentile(values, share) for share in (50, 95, 99, 100)] == [50, 95, 99, 100]
        assert percentile([3.0], 99) == 3.0

    def test_difference_of_scrapes_counts_new_series_from_zero(self) -> None:
        assert gained_between({"a": 2.0}, {"a": 5.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}

    @pytest.mark.parametrize(
        ("batches", "largest"),
        [([1, 1, 1, 4], 13), ([13] * 20, 13), ([2, 3, 5, 9, 13], 13), ([40, 50, 60], 279)],
    )
    def test_batch_sizes_have_as_many_segments_as_the_histogram(self, batches: list[int], largest: int) -> None:
        bounds = [2**n for n in range(10)]
        gained = {
            f'moonvit_batch_segments_bucket{{le="{float(bound)}"}}': float(sum(size <= bound for size in batches))
            for bound in bounds
        }
        gained |= {"moonvit_batch_segments_count": len(batches), "moonvit_batch_segments_sum": float(sum(batches))}
        sizes = service.batch_sizes(gained, largest)
        assert sum(sizes.values()) == len(batches)
        assert max(sizes) <= largest
        found = sum(size * count for size, count in sizes.items())
        assert found == pytest.approx(sum(batches), abs=len(batches) / 2)  # a size is a whole number

    def test_sizes_take_turns_as_often_as_they_were(self) -> None:
        order = service.in_turns({1: 10, 13: 30}, turns=40)
        assert (order.count(1), order.count(13)) == (10, 30)
        assert all(1 in order[start : start + 8] for start in range(32))


class TestMachine:
    def test_commit_is_what_the_variable_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(machine.COMMIT_VARIABLE, "0123abc")
        assert machine.describe("torch")["commit"] == "0123abc"

    def test_commit_notes_changes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def git(*arguments: str) -> str:
            identity = ("-c", "user.name=a", "-c", "user.email=a@b")
            command = ["git", "-C", str(tmp_path), *identity, *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
        monkeypatch.setattr(machine, "ROOT", tmp_path)
        assert machine.commit() is None
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "x.py").write_text("1")
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "one")
        head = git("rev-parse", "HEAD").strip()
        (tmp_path / "README.md").write_text("not measured")
        assert machine.commit() == head
        (tmp_path / "app" / "x.py").write_text("2")
        assert machine.commit() == f"{head}+changes"

    def test_packages_that_are_not_installed_are_left_out(self) -> None:
        assert set(machine.describe("numpy", "no-such-package")["versions"]) == {"python", "numpy"}


class TestPlainServer:
    def test_requests_are_counted_however_they_are_cut(self) -> None:
        request = b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n0123456789"
        for cut in range(1, len(request)):
            requests = Requests()
            assert [requests.feed(request[:cut]), requests.feed(request[cut:])] == [0, 1]
            assert requests.feed(request) == 1

    @pytest.mark.parametrize("flags", [(), ("--threads",)], ids=["loop", "threads"])
    def test_clients_read_whole_answers(self, flags: tuple[str, ...]) -> None:
        port, body_bytes = free_port(), 3_000_000
        command = [sys.executable, "-m", "benchmarks.plain_server", "--port", str(port)]
        server = subprocess.Popen([*command, "--body-bytes", str(body_bytes), *flags])
        try:
            wait_until_listening(port)
            connection = Connection(port)
            for picture in (b"x", b"x" * 100_000):
                begun = time.monotonic()
                status, length, first_byte_s = connection.ask(request_bytes(picture, port))
                assert (status, length) == (200, body_bytes)
                assert begun <= first_byte_s <= time.monotonic()
            connection.close()
            tally = Tally()
            start = time.monotonic()
            drive(port, [request_bytes(b"x", port), request_bytes(b"y", port, form=True)], start, start + 0.3, tally)
            assert tally.answer_bytes == body_bytes
            assert len(tally.finished) > 1
            assert not tally.failures
        finally:
            server.kill()
            server.wait()


class TestDrive:
    def test_refusals_and_broken_connections_are_counted_apart(self) -> None:
        tally, answers = Tally(), [response(429), response(200, b"abc"), b"HTTP/1.1 200 X\r\ncontent-le"]
        with answering(answers) as port:
            start = time.monotonic()
            drive(port, [request_bytes(b"x", port)], start, start + 1.0, tally)
        assert tally.failures["429"] == 1
        assert tally.failures["ConnectionError"] >= 1
        assert tally.answer_bytes == 3


@contextmanager
def answering(answers: list[bytes]) -> Iterator[int]:
    """One connection after the other; each gets one request's answer and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            for turn in range(1000):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while connection.recv(65536):
                        connection.sendall(answers[min(turn, len(answers) - 1)])
                        break

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


class TestAsyncClient:
    def test_difference(self) -> None:
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        assert difference(values, values.copy()) == 0
        assert difference(values * np.float32(1.01), values) == pytest.approx(0.01, rel=1e-3)
        assert difference(values[:2], values) == float("inf")
        assert difference(values * np.float32("nan"), values) == float("inf")
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
        assert difference(bits, bits.copy()) == 0
        assert 0 < difference(bits + np.uint16(1), bits) < 0.02

    def test_embeddings_of_a_safetensors_answer(self) -> None:
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        assert np.array_equal(embeddings(safetensors(values) + b"token offsets"), values)

    @pytest.mark.parametrize(
        ("status", "headers", "honest"),
        [
            (429, {"content-type": "application/problem+json", "retry-after": "1"}, True),
            (429, {"content-type": "application/problem+json"}, False),
            (503, {"content-type": "text/plain", "retry-after": "1"}, False),
            (504, {"content-type": "application/problem+json"}, True),
            (500, {"content-type": "application/problem+json", "retry-after": "1"}, False),
        ],
    )
    def test_which_refusals_are_honest(self, status: int, headers: dict[str, str], honest: bool) -> None:
        assert Answer(status, headers, bytearray()).is_honest_refusal is honest

    async def test_answers_in_pieces_and_connections_that_are_kept(self) -> None:
        body = bytes(range(256)) * 4000

        async def slowly(writer: asyncio.StreamWriter) -> None:
            whole = response(200, body)
            for piece in (whole[:5], whole[5:40], whole[40:]):
                writer.write(piece)
                await writer.drain()

        async with serve(slowly) as server:
            connections = Connections(server.port)
            answer = await connections.ask(b"GET / HTTP/1.1\r\n\r\n")
            assert (answer.status, bytes(answer.body)) == (200, body)
            connections.close()

    async def test_an_answer_that_ends_early_is_an_error(self) -> None:
        async with serve(response(200, b"abc", content_length=10)) as server:
            with pytest.raises(ConnectionError, match="in its body"):
                await Connections(server.port).ask(b"GET / HTTP/1.1\r\n\r\n")


class TestCallers:
    """One picture, one answer each."""

    @pytest.fixture
    def media(self, tmp_path: Path) -> Path:
        (tmp_path / "00000.jpg").write_bytes(jpeg(0, 32, 32))
        np.save(tmp_path / "00000.npy", np.ones((2, 3), dtype=np.float32))
        return tmp_path

    @pytest.mark.parametrize(
        ("answer", "outcome"),
        [
            (response(200, safetensors(np.ones((2, 3), dtype=np.float32))), "exact"),
            (response(200, safetensors(np.full((2, 3), 1 + 2**-20, dtype=np.float32))), "close"),
            (response(200, safetensors(np.full((2, 3), 1.01, dtype=np.float32))), "wrong"),
            (response(200, safetensors(np.ones((3, 2), dtype=np.float32))), "wrong"),
            (response(429, b"{}", content_type="application/problem+json", retry_after=1), "429"),
            (response(429, b"{}", content_type="application/problem+json"), "lost"),
            (response(500, b"{}"), "lost"),
            (response(200, b"short", content_length=999), "lost"),
        ],
    )
    async def test_what_becomes_of_a_request(self, media: Path, answer: bytes, outcome: str) -> None:
        async with serve(answer) as server:
            callers = Callers(server.port, media)
            begun = time.monotonic()
            await callers.open(100.0, begun, begun + 0.03)
            callers.close()
            assert server.targets == ["/v1/encode?dtype=float32"] * 3
        assert sum(callers.seconds.values(), Counter()) == {outcome: 3}
        assert bool(callers.faults) == (outcome in ("wrong", "lost"))
        assert len(callers.latencies) == (3 if outcome in ("exact", "close") else 0)


def test_pictures_are_the_same_in_every_run_and_differ_from_each_other() -> None:
    assert jpeg(3, 64, 48) == jpeg(3, 64, 48)
    assert len({jpeg(number, 64, 48) for number in range(8)}) == 8
