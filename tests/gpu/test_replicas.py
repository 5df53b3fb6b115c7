"""Towers in worker processes on a GPU: the bits of the engine in this process, real device errors, and a front that
never opens the GPU."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.replicas import TowerSpec, WorkerTower
from app.tower import Pending, TowerLost
from encoder import Engine, PackedBatch
from encoder.device import device_errors
from tests.faulty_towers import batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "demo:k3-tiny"
BREAKS = 13  # segments of a batch that its worker reads beyond an array's end for


@dataclass(frozen=True)
class BreakingSpec(TowerSpec):
    def load(self) -> Engine:
        return BreakingEngine(super().load())  # type: ignore[return-value]


class BreakingEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def submit(self, batch: PackedBatch, out: Tensor | None = None) -> Pending:
        if len(batch) != BREAKS:
            return self._engine.submit(batch, out)

        def wait() -> Tensor:
            with device_errors():
                beyond = torch.arange(4, device=self._engine.device) + 1_000_000
                return torch.zeros(4, device=self._engine.device)[beyond].cpu()

        return wait


@pytest.fixture(scope="module")
def engine() -> Engine:
    loaded = Engine.load(MODEL, device="cuda")
    loaded.warm_up()
    return loaded


@pytest.fixture
def tower(engine: Engine) -> Iterator[WorkerTower]:
    reasons: list[str] = []
    spec = BreakingSpec(MODEL, "cuda:0", torch.bfloat16, log_format="console")
    made = WorkerTower(spec, engine.config.vision.text_hidden_size, on_restart=reasons.append)
    made.reasons = reasons  # type: ignore[attr-defined]
    made.start()
    made.wait_until_loaded()
    yield made
    made.close()


def test_a_worker_gives_the_engines_bits_through_pinned_shared_memory(
    tower: WorkerTower, engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = [batch_of(number, engine, seed=number, rows=rows) for number, rows in ((1, 4), (9, 20), (40, 2), (3, 64))]
    for batch in batches * 2:
        assert torch.equal(tower.submit(batch)(), engine.run_to_host(batch))
    first, second = tower.submit(batches[1]), tower.submit(batches[3])
    assert torch.equal(first(), engine.run_to_host(batches[1]))
    assert torch.equal(second(), engine.run_to_host(batches[3]))
    assert "cannot be pinned" not in capfd.readouterr().err


def test_an_engine_fills_the_memory_it_is_given(engine: Engine) -> None:
    batch = batch_of(5, engine)
    expected = engine.run_to_host(batch)
    for out in (torch.empty_like(expected), torch.empty(expected.shape, dtype=expected.dtype, pin_memory=True)):
        assert engine.submit(batch, out)() is out
        assert torch.equal(out, expected)


def test_a_device_error_costs_the_process_and_not_the_service(tower: WorkerTower, engine: Engine) -> None:
    with pytest.raises(TowerLost):
        tower.submit(batch_of(BREAKS, engine))()
    assert tower.wait_until_up(300)
    batch = batch_of(4, engine)
    assert torch.equal(tower.submit(batch)(), engine.run_to_host(batch))
    assert tower.reasons == ["device_failed"]  # type: ignore[attr-defined]


def test_a_killed_worker_comes_back(tower: WorkerTower, engine: Engine) -> None:
    pid = tower.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    pending = tower.submit(batch_of(3, engine))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TowerLost):
        pending()
    assert tower.wait_until_up(300)
    batch = batch_of(4, engine)
    assert torch.equal(tower.submit(batch)(), engine.run_to_host(batch))


FRONT = """
import asyncio, io, json, httpx, torch
from PIL import Image
from app.main import create_app
from app.settings import Settings

async def main():
    app = create_app(Settings(device="cuda", tower_process=True, film_workers=1))
    async with app.router.lifespan_context(app):
        await app.state.starting
        picture = io.BytesIO()
        Image.new("RGB", (280, 280), (200, 10, 10)).save(picture, "PNG")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60) as client:
            body, headers = picture.getvalue(), {"content-type": "image/png"}
            answer = await client.post("/v1/encode", content=body, headers=headers)
            info = (await client.get("/v1/info")).json()
    open_gpus = [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]
    print(json.dumps({"status": answer.status_code, "open": open_gpus, "towers": info["towers"]}))

asyncio.run(main())
"""


def test_the_front_never_opens_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", FRONT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["open"]) == (200, [])
    assert found["towers"][0]["device"] == "cuda"
