"""An embedding is computed once: for the same bytes again, for callers at the same time, and over a restart."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from app.decode import Prepared
from app.store import Loans, StoredEmbedding
from tests.clips import make_film
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import data_uri, encode, image, numbers
from tests.http.test_problems import check
from tests.http.tower import SlowTower, until_queued


class CountingTower:
    def __init__(self) -> None:
        self.segments = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        self.segments += len(batch)
        return fake_run(batch)


async def test_the_same_bytes_again_are_not_decoded_again(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = CountingTower()
    client = await connect(run=tower)
    first = (await encode(client, image(png(40, 56, 28)))).json()

    async def no_decoding(*_: Any, **__: Any) -> Any:
        raise AssertionError("a hit is found before decoding")

    monkeypatch.setattr(client.app.state.service._decoder, "prepare", no_decoding)  # type: ignore[attr-defined]
    again = (await encode(client, image(png(40, 56, 28)))).json()
    assert (first["data"][0].pop("cache"), again["data"][0].pop("cache")) == ("miss", "hit")
    assert first["data"] == again["data"]
    assert tower.segments == 1
    assert again["timing_ms"]["decode"] == again["timing_ms"]["encode"] == 0
    store = (await client.get("/v1/info")).json()["store"]
    assert (store["hits"], store["misses"], store["entries"]) == (1, 1, 1)


async def test_a_film_from_the_store_says_all_that_it_said(connect: Connect) -> None:
    tower = CountingTower()
    client = await connect(run=tower)
    part = {"type": "video_url", "video_url": data_uri(make_film(num_frames=6, fps=8), "video/mp4")}
    first, again = [(await encode(client, part)).json()["data"][0] for _ in range(2)]
    assert (first.pop("cache"), again.pop("cache")) == ("miss", "hit")
    assert first == again
    assert tower.segments == 2
    other = (await encode(client, part | {"max_frames": 2})).json()["data"][0]
    assert other["cache"] == "miss"


async def test_every_dtype_is_made_from_what_is_stored(connect: Connect) -> None:
    client = await connect(run=CountingTower())
    exact = numbers((await encode(client, image(png(77)))).json()["data"][0])
    half = (await encode(client, image(png(77)), dtype="float16")).json()["data"][0]
    assert half["cache"] == "hit"
    assert (await encode(client, image(png(77)))).json()["data"][0]["cache"] == "hit"
    assert numbers((await encode(client, image(png(77)))).json()["data"][0]).tolist() == exact.tolist()


async def test_callers_at_the_same_time_share_one_computation(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    same = [asyncio.create_task(encode(client, image(png(2, 56, 56)))) for _ in range(30)]
    await until_queued(client, 16)
    tower.release()
    answers = [response.json()["data"][0] for response in await asyncio.gather(*same)]
    assert len({answer["embedding"] for answer in answers}) == 1
    assert (await first).status_code == 200
    assert tower.patches_run == 4 + 16


async def test_one_callers_deadline_is_not_the_others(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    hasty = asyncio.create_task(encode(client, image(png(2)), deadline_ms=100))
    await until_queued(client, 4)
    patient = asyncio.create_task(encode(client, image(png(2))))
    check(await hasty, 504, "deadline_exceeded", 0)
    tower.release()
    assert (await patient).status_code == 200
    assert (await first).status_code == 200


async def test_a_failure_is_not_kept(connect: Connect) -> None:
    fail = True

    def sometimes(batch: Any) -> torch.Tensor:
        if fail:
            raise KeyError("bug")
        return fake_run(batch)

    client = await connect(run=sometimes)
    check(await encode(client, image(png(1))), 500, "internal", 0)
    fail = False
    assert (await encode(client, image(png(1)))).json()["data"][0]["cache"] == "miss"


async def test_without_memory_nothing_is_kept(connect: Connect) -> None:
    tower = CountingTower()
    client = await connect(run=tower, store_bytes=0)
    for _ in range(2):
        assert (await encode(client, image(png(1)))).json()["data"][0]["cache"] == "miss"
    assert tower.segments == 2


async def test_a_directory_keeps_embeddings_over_a_restart(connect: Connect, tmp_path: Path) -> None:
    before = CountingTower()
    client = await connect(run=before, store_dir=tmp_path / "store")
    first = (await encode(client, image(png(8)))).json()["data"][0]
    await client.app.state.service.stop()  # type: ignore[attr-defined]
    after = CountingTower()
    client = await connect(run=after, store_dir=tmp_path / "store")
    again = (await encode(client, image(png(8)))).json()["data"][0]
    assert (first.pop("cache"), again.pop("cache")) == ("miss", "hit")
    assert first == again
    assert after.segments == 0


async def test_one_item_alone_in_its_batch_is_answered_without_a_copy(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    expected = [numbers((await encode(client, image(png(level)))).json()["data"][0]) for level in (41, 42, 43)]
    client = await connect(store_bytes=0)
    copies: list[int] = []
    of = StoredEmbedding.of

    def counted(key: str, prepared: Prepared, rows: Sequence[torch.Tensor]) -> StoredEmbedding:
        copies.append(len(rows))
        return of(key, prepared, rows)

    monkeypatch.setattr(StoredEmbedding, "of", counted)
    for level, numbers_of_it in zip((41, 42, 43), expected, strict=True):
        found = numbers((await encode(client, image(png(level)))).json()["data"][0])
        assert found.tolist() == numbers_of_it.tolist()
    assert copies == []
    client.app.state.service.pipeline._loans = Loans(0)  # type: ignore[attr-defined]  # as if slow readers had them all
    found = numbers((await encode(client, image(png(43)))).json()["data"][0])
    assert found.tolist() == expected[2].tolist()
    assert copies == [1]


async def test_rows_that_share_their_batch_are_copied(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = SlowTower()
    client = await connect(run=tower, store_bytes=0)
    alone = asyncio.create_task(encode(client, image(png(50))))
    await tower.busy()
    shared = [asyncio.create_task(encode(client, image(png(level)))) for level in (51, 52)]
    await until_queued(client, 8)

    loans: list[bool] = []
    take = Loans.take

    def noted(each: Loans, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        lent = take(each, rows)
        loans.append(lent is not None)
        return lent

    monkeypatch.setattr(Loans, "take", noted)
    tower.release()
    for level, answer in zip((51, 52), await asyncio.gather(*shared), strict=True):
        assert numbers(answer.json()["data"][0])[0, 0] == pytest.approx(level, abs=1)
    assert (await alone).status_code == 200
    assert sorted(loans) == [False, False, True]
