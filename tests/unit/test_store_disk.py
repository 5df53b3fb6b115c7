"""The tier on disk: what comes back, and what is found to be damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from app.store import StoredEmbedding, codec
from app.store.directory import Directory
from tests.stored import WIDTH, entry, file_of, file_size, film, key, same, saved
from tests.unit.conftest import OpenTier


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
async def test_an_entry_comes_back_after_a_restart(open_tier: OpenTier, store: Path, dtype: torch.dtype) -> None:
    tier = await open_tier()
    await saved(tier, entry(1, dtype=dtype), film(2))
    await tier.close()
    again = await open_tier()
    assert again.stats.bytes == file_size(entry(1, dtype=dtype)) + file_size(film(2))
    found = await again.load(key(1))
    assert found is not None
    assert same(found, entry(1, dtype=dtype))
    assert found.is_sound(WIDTH, dtype)
    assert found.tensor.untyped_storage().nbytes() == found.tensor.nbytes
    assert same(await again.load(key(2)), film(2))
    assert await again.load(key(3)) is None
    assert (again.stats.hits, again.stats.misses) == (2, 1)


async def test_the_file_is_ordinary_safetensors(open_tier: OpenTier, store: Path) -> None:
    await saved(await open_tier(), film(7))
    with safe_open(file_of(store, 7), "pt") as file:
        assert torch.equal(file.get_tensor("embedding"), film(7).tensor)
        facts = json.loads(file.metadata()["entry"])
    assert facts["key"] == key(7)
    assert facts["grids"] == [[4, 2, 6], [3, 2, 4]]
    assert file_of(store, 7).stat().st_mode & 0o777 == 0o600


async def test_nothing_but_keys_becomes_a_path(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = await open_tier()
    for bad in ("../" + key(1), key(1).upper(), key(1) + "\n", key(1) + "/x", "", "emb-" + "0" * 63):
        assert await tier.load(bad) is None
        tier.save(StoredEmbedding(**{**vars(entry(1)), "key": bad}))
        await tier.remove(bad)
    await tier._writer.idle()
    assert [name for _, _, names in os.walk(tmp_path) for name in names] == []
    assert tier.stats.dropped_writes == 6


async def test_a_key_that_is_there_is_not_written_again(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier()
    await saved(tier, entry(1))
    inode = file_of(store, 1).stat().st_ino
    await saved(tier, entry(1))
    assert file_of(store, 1).stat().st_ino == inode


# ---- damage


def torn(content: bytes) -> bytes:
    return content[:-1]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def flipped_tensor(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def flipped_facts(content: bytes) -> bytes:
    assert content.count(b"[640,480]") == 1
    return content.replace(b"[640,480]", b"[641,480]")


def other_dtype(content: bytes) -> bytes:
    assert content.count(b'"BF16"') == 1
    return content.replace(b'"BF16"', b'"F16" ')


def other_shape(content: bytes) -> bytes:
    assert content.count(b'"shape":[4,8]') == 1
    return content.replace(b'"shape":[4,8]', b'"shape":[8,4]')


DAMAGE: list[Callable[[bytes], bytes]] = [
    torn,
    longer,
    flipped_tensor,
    flipped_facts,
    other_dtype,
    other_shape,
    lambda content: b"",
    lambda content: content[:7],
    lambda content: content[:8],
    lambda content: content[:100],
    lambda content: b"\xff" * 8 + content[8:],
    lambda content: b"GIF89a" + b"\0" * 1000,
    lambda content: (2).to_bytes(8, "little") + b"{}",
    lambda content: b"".join(codec.dump(entry(2))),  # whole, but of another key
]


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_a_miss_and_is_removed(
    open_tier: OpenTier, store: Path, damage: Callable[[bytes], bytes]
) -> None:
    tier = await open_tier()
    await saved(tier, entry(1))
    file = file_of(store, 1)
    file.write_bytes(damage(file.read_bytes()))
    assert await tier.load(key(1)) is None
    assert not file.exists()
    assert (tier.stats.damaged, tier.stats.misses, tier.stats.failures) == (1, 1, 0)
    await saved(tier, entry(1))
    assert same(await tier.load(key(1)), entry(1))


@given(place=st.integers(0, file_size(entry(1)) - 1), mask=st.integers(1, 255))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_changed_byte_gives_other_values(tmp_path: Path, place: int, mask: int) -> None:
    directory = Directory(tmp_path, 1 << 20)
    content = bytearray(b"".join(codec.dump(entry(1))))
    content[place] ^= mask
    (tmp_path / f"{key(1)}.safetensors").write_bytes(content)
    try:
        found = directory.read(key(1))
    except codec.DamagedError:
        return
    assert same(found, entry(1))  # white space in the header's padding


async def test_a_safetensors_file_of_somebody_else_is_not_ours(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier()
    save_file({"embedding": entry(1).tensor}, file_of(store, 1))
    assert await tier.load(key(1)) is None
    assert tier.stats.damaged == 1


async def test_a_link_is_not_followed(open_tier: OpenTier, tmp_path: Path, store: Path) -> None:
    tier = await open_tier()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"".join(codec.dump(entry(1))))
    file_of(store, 1).symlink_to(elsewhere)
    assert await tier.load(key(1)) is None
    assert elsewhere.exists()
    assert not file_of(store, 1).is_symlink()
    file_of(store, 1).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    await saved(tier, entry(1))
    assert not file_of(store, 1).is_symlink()
    assert elsewhere.read_bytes() == before


async def test_a_directory_or_a_pipe_in_place_of_a_file_harms_nothing(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier()
    file_of(store, 1).mkdir()
    (file_of(store, 1) / "theirs").touch()
    os.mkfifo(file_of(store, 2))
    for number in (1, 2):
        assert await tier.load(key(number)) is None
        await saved(tier, entry(number))
    assert (file_of(store, 1) / "theirs").exists()
    assert same(await tier.load(key(2)), entry(2))
    await saved(tier, entry(3))  # and the tier still works
    assert same(await tier.load(key(3)), entry(3))
    assert (tier.stats.damaged, tier.stats.failures) == (2, 0)


async def test_a_file_larger_than_the_tier_is_not_read(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier(max_bytes=10_000)
    head, _ = codec.dump(entry(1))
    with file_of(store, 1).open("wb") as file:
        file.write(head)
        file.truncate(1 << 40)  # takes no space
    assert await tier.load(key(1)) is None
    assert not file_of(store, 1).exists()
