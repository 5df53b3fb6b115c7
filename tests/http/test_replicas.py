"""The real command with its towers in worker processes: answers, kills, hangs, shutdown."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import load

from encoder import Engine, preprocess_image
from tests.clips import numbered_frame
from tests.http.test_socket import MODEL, running, to_png, wait_until_busy
from tests.scrape import samples_of

LONG = 60.0  # nothing here takes so long
STALL_S = 3.0
FLAGS = ("--device", "cpu", "--film-workers", "1", "--store-bytes", "0")  # every request is computed
HEADERS = {"content-type": "image/png", "accept": "application/vnd.safetensors"}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """Two workers."""
    with running(*FLAGS, "--data-parallel-size", "2", "--batch-stall-s", str(STALL_S)) as (_, url):
        yield url


@pytest.fixture(scope="module")
def pictures() -> list[tuple[bytes, torch.Tensor]]:
    """Files, and the embeddings that the engine of this process gives on as many threads as one of the two has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    engine = Engine.load(MODEL)
    made = []
    for i in range(10):
        picture = Image.fromarray(numbered_frame(i, 60 + 28 * i, 300 - 20 * i))
        made.append((to_png(picture), engine.encode([preprocess_image(picture, engine.config)])[0]))
    torch.set_num_threads(threads)
    return made


async def embed(client: httpx.AsyncClient, url: str, data: bytes) -> torch.Tensor:
    answer = await client.post(f"{url}/v1/encode?dtype=float32", content=data, headers=HEADERS)
    assert answer.status_code == 200, answer.text[:500]
    return load(answer.content)["embeddings"]


def towers(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/info").json()["towers"]
    return found


def until(url: str, what: str, true: Any) -> None:
    """Until `true(towers)`."""
    deadline = time.monotonic() + LONG
    while not true(towers(url)):
        assert time.monotonic() < deadline, f"never {what}: {towers(url)}"
        time.sleep(0.05)


def until_all_up(url: str) -> None:
    until(url, "up", lambda found: all(tower["state"] == "up" for tower in found))


def until_gone(*pids: int) -> None:
    deadline = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)


def restarts(url: str, reason: str) -> float:
    series = samples_of(httpx.get(f"{url}/metrics").text)
    return sum(series[f'moonvit_tower_restarts_total{{reason="{reason}",tower="{tower}"}}'] for tower in (0, 1))


def held(pid: int) -> tuple[int, int]:
    """Descriptors, and children of a process."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return len(os.listdir(f"/proc/{pid}/fd")), sum(len(path.read_text().split()) for path in children)  # noqa: PTH208


async def test_two_workers_share_the_work_and_give_the_engines_bits(
    service: str, pictures: list[tuple[bytes, torch.Tensor]]
) -> None:
    async with httpx.AsyncClient(timeout=LONG) as client:
        for data, expected in pictures:  # alone in its batch, as in the engine
            assert torch.equal(await embed(client, service, data), expected)
        together = await asyncio.gather(*(embed(client, service, data) for data, _ in pictures * 4))
        series = samples_of((await client.get(f"{service}/metrics")).text)
    for rows, (_, expected) in zip(together, pictures * 4, strict=True):
        assert float((rows - expected).abs().max()) < 1e-5
    shares = [series[f'moonvit_tower_batches_total{{tower="{tower}"}}'] for tower in (0, 1)]
    assert min(shares) > 0
    assert sum(shares) == series['moonvit_batches_total{outcome="ok"}']
    assert [series[f'moonvit_tower_up{{tower="{tower}"}}'] for tower in (0, 1)] == [1, 1]
    assert [series[f'moonvit_tower_outstanding_patches{{tower="{tower}"}}'] for tower in (0, 1)] == [0, 0]


async def test_a_worker_killed_amid_50_requests_costs_none_of_them(
    service: str, pictures: list[tuple[bytes, torch.Tensor]]
) -> None:
    until_all_up(service)
    front = parent_of(towers(service))
    before, crashes = held(front), restarts(service, "crashed")
    cases = pictures * 5
    async with httpx.AsyncClient(timeout=LONG) as client:
        work = [asyncio.create_task(embed(client, service, data)) for data, _ in cases]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        victim = towers(service)[1]["pid"]
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*work)
    assert len(answers) == 50
    for rows, (_, expected) in zip(answers, cases, strict=True):
        assert float((rows - expected).abs().max()) < 1e-5
    until_all_up(service)
    assert restarts(service, "crashed") == crashes + 1
    assert towers(service)[1]["restarts"] >= 1
    assert towers(service)[1]["pid"] != victim
    # Blocks of memory have a descriptor each, and the new worker may have fewer of them.
    descriptors, children = held(front)
    assert children == before[1]
    assert descriptors <= before[0] + 12
    assert not leaked_memory(front)


def parent_of(found: list[dict[str, Any]]) -> int:
    status = Path(f"/proc/{found[0]['pid']}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def leaked_memory(front: int) -> list[str]:
    """Shared blocks in the service that no worker has mapped."""

    def blocks(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:batch" in line}

    children = {int(pid) for path in Path(f"/proc/{front}/task").glob("*/children") for pid in path.read_text().split()}
    return sorted(blocks(front) - set().union(*map(blocks, children)))


async def test_a_worker_that_hangs_is_replaced_and_its_work_done_elsewhere(
    service: str, pictures: list[tuple[bytes, torch.Tensor]]
) -> None:
    until_all_up(service)
    stalls = restarts(service, "stalled")
    victim = towers(service)[0]["pid"]
    os.kill(victim, signal.SIGSTOP)
    async with httpx.AsyncClient(timeout=LONG) as client:
        answers = await asyncio.gather(*(embed(client, service, data) for data, _ in pictures))
        assert (await client.get(f"{service}/health/ready")).status_code == 200
    for rows, (_, expected) in zip(answers, pictures, strict=True):
        assert float((rows - expected).abs().max()) < 1e-5
    until_gone(victim)
    until_all_up(service)
    assert restarts(service, "stalled") == stalls + 1


async def test_requests_wait_while_no_worker_is_up(service: str, pictures: list[tuple[bytes, torch.Tensor]]) -> None:
    until_all_up(service)
    for tower in towers(service):
        os.kill(tower["pid"], signal.SIGKILL)
    until(service, "down", lambda found: not any(tower["state"] == "up" for tower in found))
    async with httpx.AsyncClient(timeout=LONG) as client:
        ready = await client.get(f"{service}/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "device_failed")
        assert "no tower is up, of 2" in ready.json()["detail"]
        data, expected = pictures[0]
        assert torch.equal(await embed(client, service, data), expected)
        until_all_up(service)
        assert (await client.get(f"{service}/health/ready")).status_code == 200


async def test_sigterm_finishes_what_the_workers_have_and_ends_them(
    pictures: list[tuple[bytes, torch.Tensor]],
) -> None:
    with running(*FLAGS, "--data-parallel-size", "2") as (process, url):
        pids = [tower["pid"] for tower in towers(url)]
        picture = Image.fromarray(numbered_frame(1, 1400, 1000))
        async with httpx.AsyncClient(timeout=LONG) as client:
            work = [asyncio.create_task(embed(client, url, to_png(picture))) for _ in range(4)]
            await asyncio.to_thread(wait_until_busy, url)
            process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*work)
        assert all(torch.isfinite(rows).all() for rows in answers)
        assert await asyncio.to_thread(process.wait, 30) == 0
        until_gone(*pids)


async def test_a_single_tower_in_a_process_of_its_own_survives_kills_and_dies_with_the_service(
    pictures: list[tuple[bytes, torch.Tensor]],
) -> None:
    with running(*FLAGS, "--tower-process") as (process, url):
        (tower,) = towers(url)
        assert tower["pid"] != process.pid
        os.kill(tower["pid"], signal.SIGKILL)
        data, expected = pictures[0]
        async with httpx.AsyncClient(timeout=LONG) as client:
            assert float((await embed(client, url, data) - expected).abs().max()) < 1e-5
        until_all_up(url)
        (successor,) = towers(url)
        assert successor["pid"] != tower["pid"]
        assert process.poll() is None
        os.kill(successor["pid"], signal.SIGSTOP)  # so that it cannot notice by itself
        process.kill()
        process.wait()
        until_gone(successor["pid"])


def test_the_engine_of_the_service_is_a_tower_too() -> None:
    with running(*FLAGS) as (process, url):
        assert towers(url) == [
            {
                "device": "cpu",
                "state": "up",
                "pid": process.pid,
                "restarts": 0,
                "outstanding_patches": 0,
                "attention": "sdpa",
                "out_of_service": {},
            }
        ]
        with contextlib.suppress(ProcessLookupError):
            assert held(process.pid)[1] > 0  # its decoders
