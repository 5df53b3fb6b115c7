"""The two tiny models of this folder: the module filled with their weights, and their recorded cases."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from encoder import EncoderConfig, Grid, Segment
from encoder.model import MoonViT3d
from tests.golden import goldens

MODELS = ("k3_tiny", "k25_tiny")


class Case(NamedTuple):
    """One packed call of the reference: what went in, and every stage that was recorded."""

    pixel_u8: Tensor
    grids: list[Grid]
    lut: Tensor  # (256,) float32: 8-bit value -> normalised value
    stages: dict[str, Tensor]

    def segments(self, dtype: torch.dtype = torch.uint8) -> list[Segment]:
        pixels = self.pixel_u8 if dtype == torch.uint8 else self.lut[self.pixel_u8.long()]
        parts = pixels.split([grid.num_patches for grid in self.grids])
        return [Segment(part, grid) for part, grid in zip(parts, self.grids, strict=True)]


def config(model: str) -> EncoderConfig:
    return goldens.tiny_config(model.removesuffix("_tiny"))


def weights(model: str) -> dict[str, Tensor]:
    return goldens.tensors(f"{model}_weights.safetensors")


@cache
def tower(model: str, dtype: torch.dtype) -> MoonViT3d:
    """The module itself, filled without the code under test in `encoder.weights`."""
    module = MoonViT3d(config(model))
    module.load_state_dict(weights(model), strict=True)
    return module.to(dtype).requires_grad_(False)


def _case_file(model: str) -> dict[str, Tensor]:
    return goldens.tensors(f"{model}_cases.safetensors")


def case_names(model: str) -> list[str]:
    return sorted({key.split("/")[0] for key in _case_file(model)} - {"pixel_lut"})


def case(model: str, name: str) -> Case:
    file = _case_file(model)
    stages = {key.removeprefix(f"{name}/"): value for key, value in file.items() if key.startswith(f"{name}/")}
    grids = [Grid(*grid) for grid in stages.pop("grid_thws").tolist()]
    return Case(stages.pop("pixel_u8"), grids, file["pixel_lut"], stages)
