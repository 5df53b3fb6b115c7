"""Requests take turns on the device: pictures pass a film's chunks, interactive work passes the batch class."""

import asyncio
from typing import Any

import pytest
import torch

from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.http.tower import SlowTower, until_queued
from tests.scrape import nonzero, scrape


class OrderedTower(SlowTower):
    """Notes the patches of every batch's segments."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        self.batches.append(sorted(batch.lengths))
        return super().__call__(batch)


async def test_interactive_requests_are_encoded_before_the_batch_class(connect: Connect) -> None:
    tower = OrderedTower()
    client = await connect(run=tower)
    budget = client.app.state.service.max_batch_patches  # type: ignore[attr-defined]
    side = 2044  # 146 x 146 patches: more than an eighth of a batch, and four are more than one
    assert budget / 8 < 146 * 146 < budget / 2 < 2 * 146 * 146
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    late = [png(2 + i, side, side) for i in range(4)]
    running.append(asyncio.create_task(encode(client, *map(image, late), priority="batch")))
    # A request keeps two batches of its own in the queue at most.
    await until_queued(client, 4 * 146 * 146)
    running.append(asyncio.create_task(encode(client, image(png(9, 56, 56)))))
    await until_queued(client, 4 * 146 * 146 + 16)
    tower.release()
    assert [response.status_code for response in await asyncio.gather(*running)] == [200] * 3
    assert tower.batches[:2] == [[4], [16]]
    found = nonzero(await scrape(client), "moonvit_queue_wait_seconds_count")
    assert found == {'{priority="interactive"}': 2, '{priority="batch"}': 4}


async def test_requests_take_turns_however_many_items_they_have(connect: Connect) -> None:
    tower = OrderedTower()
    client = await connect(run=tower)
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    many, few = 146 * 146, 148 * 148  # three fit a batch
    running.append(asyncio.create_task(encode(client, *[image(png(2 + i, 2044, 2044)) for i in range(6)])))
    await until_queued(client, 6 * many)
    running.append(asyncio.create_task(encode(client, *[image(png(9 + i, 2072, 2072)) for i in range(2)])))
    await until_queued(client, 6 * many + 2 * few)
    tower.release()
    assert [response.status_code for response in await asyncio.gather(*running)] == [200] * 3
    assert tower.batches == [[4], [many, many, few], [many, many, few], [many, many]]


@pytest.mark.parametrize("stream", [False, True])
async def test_both_priorities_give_the_same_embedding(connect: Connect, stream: bool) -> None:
    client = await connect(run=fake_run)
    headers = {"accept": "application/x-ndjson"} if stream else {}
    answers = []
    for priority in ("interactive", "batch"):
        body = {"input": [image(png(7))], "priority": priority}
        answers.append((await client.post("/v1/encode", json=body, headers=headers)).text)
    assert all('"object":"embedding"' in answer for answer in answers)
    assert '"cache":"hit"' in answers[1]  # the priority is no part of the key


async def test_another_priority_is_refused(connect: Connect) -> None:
    client = await connect()
    problem = check(await encode(client, image(png(1)), priority="low"), 400, "invalid_request")
    assert "priority" in problem["detail"]
    assert "'interactive' or 'batch'" in problem["detail"]
    url = "/v1/encode?priority=low"
    check(await client.post(url, content=png(1), headers={"content-type": "image/png"}), 400, "invalid_request")


async def test_the_openapi_document_names_both(connect: Connect) -> None:
    document = (await (await connect()).get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for name in ("EncodeRequest", "EncodeOptions"):
        assert schemas[name]["properties"]["priority"]["enum"] == ["interactive", "batch"]
    parameters = {each["name"] for each in document["paths"]["/v1/encode"]["post"]["parameters"]}
    assert "priority" in parameters
