"""docs/reliability.md names tests that exist, for every known media case; and the cases no other test covers."""

import ast
import random
import re
from pathlib import Path

import psutil
import pytest

from tests.http.conftest import Connect, png
from tests.http.test_encode import data_uri, encode, numbers
from tests.http.test_problems import check

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
NUM_CASES = 42


def test_every_case_has_a_test() -> None:
    rows = re.findall(r"^\| (M\d\d) \| .+? \| (.+) \|$", PAGE, re.MULTILINE)
    assert [case for case, _ in rows] == [f"M{number:02}" for number in range(1, NUM_CASES + 1)]
    assert all("::" in tests for _, tests in rows)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z/_0-9]+\.py::\w+)`", PAGE))))
def test_every_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert function in {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


async def test_the_bytes_decide_on_every_road(connect: Connect) -> None:  # M12
    """A PNG that is called a JPEG is a PNG; JSON that is called a PNG is none. By URL: tests/http/test_fetching.py."""
    client = await connect()
    for data, status in ((png(40), 200), (b'{"error": "no such file"}', 415)):
        answers = [
            await encode(client, data_uri(data, "image/jpeg")),
            await client.post("/v1/encode?dtype=float32", content=data, headers={"content-type": "image/jpeg"}),
            await client.post("/v1/encode", files={"f": ("a.jpg", data, "image/jpeg")}),
        ]
        for answer in answers:
            if status == 200:
                assert answer.status_code == 200
            else:
                check(answer, status, "unsupported_media", 0)
        if status == 200:
            assert numbers(answers[0].json()["data"][0])[:, 0] == pytest.approx(40)


async def test_memory_stays_flat_over_different_pictures(connect: Connect) -> None:  # M37
    """Hundreds, none like another; their embeddings are kept up to a bound that is reached early."""
    client = await connect(store_bytes=1 << 20)
    choice = random.Random(5)

    async def send(count: int) -> None:
        for _ in range(count // 20):
            sizes = [(choice.randrange(8, 300), choice.randrange(8, 300)) for _ in range(20)]
            parts = [data_uri(png(choice.randrange(256), width, height)) for width, height in sizes]
            assert (await encode(client, *parts)).status_code == 200

    await send(200)
    before = psutil.Process().memory_info().rss
    await send(300)
    assert (psutil.Process().memory_info().rss - before) / 1e6 < 20
