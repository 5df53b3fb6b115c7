"""Loaders of the arrays beside this file; README.md says how they were made."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from encoder.config import EncoderConfig, parse_config

GOLDEN = Path(__file__).parent
FAMILY = {"k3": "kimi_k3", "k25": "kimi_k25", "k26": "kimi_k25"}


@cache
def read_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / name)


@cache
def config(name: str) -> EncoderConfig:
    """k3, k25 or k26: the family's full-size tower with the `media_proc_cfg` of the preprocessing goldens."""
    media = read_json("preprocess/images.json")["media_proc_cfg"][name]
    return parse_config({"model_type": FAMILY[name]}, {"media_proc_cfg": media}, source=name)


@cache
def tiny_config(name: str) -> EncoderConfig:
    """k3 or k25: the tower of the `*_tiny_*` files."""
    media = read_json("preprocess/images.json")["media_proc_cfg"][name]
    return parse_config(read_json(f"{name}_tiny_config.json"), {"media_proc_cfg": media}, source=f"{name}_tiny")


def sha256(array: Tensor) -> str:
    """Of the values as little-endian row-major bytes."""
    return hashlib.sha256(array.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def canvas(patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """(L, 3, P, P) patches -> (t, H, W, 3), the pictures they were cut from."""
    t, h, w = grid
    side = patches.shape[-1]
    return patches.view(t, h, w, 3, side, side).permute(0, 1, 4, 2, 5, 3).reshape(t, h * side, w * side, 3)
