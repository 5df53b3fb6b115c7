"""Demo weights are part of the product's promise: the same bits on every machine, for ever."""

import hashlib

import pytest
import torch

from encoder import CheckpointMismatch, load_config
from encoder.demo import DEMO_MODELS, demo_config, demo_tensor
from encoder.weights import open_weights, tensor_bytes


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def test_bits_of_single_tensors_are_pinned() -> None:
    linear = demo_tensor("demo:k3-tiny", "vision_tower.encoder.blocks.0.wqkv.weight", (768, 128))
    assert sha256(linear) == "1e67a282d8ba3d67b6f9d4605fbca1b861a812b31d3ee9c1efbf15dd1b663f2c"
    norm = demo_tensor("demo:k25-tiny", "mm_projector.pre_norm.weight", (144,))
    assert sha256(norm) == "a0953107a15a958ead5582e0f3104a6e3f50ea22eb33b74de51f219abe6f305a"


def test_first_values_follow_from_the_hash_alone() -> None:
    """The same numbers from Python integers: SHA-256 -> SFC64 -> 16-bit integers -> one factor -> bfloat16."""
    spec, name, mask = "demo:k3", "mm_projector.proj.0.weight", 2**64 - 1
    digest = hashlib.sha256(f"{spec}/{name}".encode()).digest()
    a, b, c, counter = (int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(4))
    integers: list[int] = []
    for _ in range(2):
        word = (a + b + counter) & mask
        a, b, c, counter = (
            b ^ (b >> 11),
            (c + (c << 3)) & mask,
            (((c << 24) | (c >> 40)) + word) & mask,
            (counter + 1) & mask,
        )
        integers += [int.from_bytes(word.to_bytes(8, "little")[i : i + 2], "little", signed=True) for i in (0, 2, 4, 6)]
    factor = torch.tensor(12.0).sqrt() * (1 / torch.tensor(6.0).mul(6).sqrt()) / 65536
    want = ((torch.tensor(integers, dtype=torch.float32) + 0.5) * factor).bfloat16()
    assert torch.equal(demo_tensor(spec, name, (2, 36)).flatten()[:8], want)


def test_tensors_do_not_depend_on_the_order_they_are_made_in() -> None:
    stored = open_weights(load_config("demo:k25-tiny"))
    names = list(stored.tensors)
    forward = {name: stored.read(name) for name in names}
    backward = {name: stored.read(name) for name in reversed(names)}
    assert all(torch.equal(forward[name], backward[name]) for name in names)


def test_every_tensor_and_model_has_its_own_values() -> None:
    shape = (16, 16)
    tensors = [demo_tensor(spec, name, shape) for spec in DEMO_MODELS for name in ("a.weight", "b.weight")]
    assert len({sha256(tensor) for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("x.wqkv.weight", (512, 400), 0.0, 1 / 20),
        ("x.patch_embed.proj.weight", (400, 3, 14, 14), 0.0, 588**-0.5),
        ("x.pos_emb.weight", (64, 64, 64), 0.0, 0.5),
        ("x.norm0.weight", (200_000,), 1.0, 0.1),
        ("x.wqkv.bias", (200_000,), 0.0, 0.1),
    ],
)
def test_moments(name: str, shape: tuple[int, ...], mean: float, deviation: float) -> None:
    values = demo_tensor("demo:k3", name, shape).float()
    assert values.mean().item() == pytest.approx(mean, abs=5 * deviation * values.numel() ** -0.5)
    assert values.std().item() == pytest.approx(deviation, rel=0.01)


def test_a_tensor_longer_than_one_chunk_is_one_stream() -> None:
    long = demo_tensor("demo:k3", "x.bias", (100_000,))
    short = demo_tensor("demo:k3", "x.bias", (32_773,))
    assert torch.equal(long[: len(short)], short)


def test_unknown_spec_lists_the_known_ones() -> None:
    with pytest.raises(CheckpointMismatch, match=r"demo:k4.*demo:k3-tiny, demo:k25-tiny, demo:k3, demo:k25"):
        demo_config("demo:k4")


def test_tiny_models_keep_what_is_special_about_the_full_ones() -> None:
    k3, k25 = load_config("demo:k3-tiny"), load_config("demo:k25-tiny")
    assert k3.is_demo
    assert k25.is_demo
    assert (k3.vision.head_dim, k25.vision.head_dim) == (128, 72)
    assert k3.vision.qkv_hidden_size != k3.vision.hidden_size
    assert k3.media == load_config("demo:k3").media
    assert k25.media == load_config("demo:k25").media
