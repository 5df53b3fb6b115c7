"""Stored weights -> model: every tensor of ours and no other, one at a time, hashed on the way."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from encoder.checkpoint import find_tensors, open_safetensors
from encoder.config import EncoderConfig
from encoder.demo import demo_tensor, is_demo_spec
from encoder.errors import CheckpointMismatch
from encoder.model import MoonViT3d

STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # safetensors' own names


class Stored(NamedTuple):
    """What is known of a tensor before it is read; `dtype` is safetensors' name for it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return STORED_DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StoredWeights:
    """The checked weights of one model, not read yet.

    Attributes:
        tensors: sorted by name.
        read: name -> CPU tensor in the stored dtype; it may be a view of a mapped file, so copy it and let it go.
    """

    tensors: dict[str, Stored]
    read: Callable[[str], Tensor]


def load_model(config: EncoderConfig, *, device: torch.device, dtype: torch.dtype) -> tuple[MoonViT3d, str]:
    """Build the model of `config.source` on the device.

    Beside the finished weights at most one stored tensor is in host memory.

    Returns:
        The model, ready for inference, and `weights_sha256` of the stored tensors.
    Raises:
        CheckpointMismatch: see `open_weights`.
    """
    model = _empty_model(config)
    stored = open_weights(config)
    digest = hashlib.sha256()
    for name in stored.tensors:
        tensor = stored.read(name)
        _hash_tensor(digest, name, tensor)
        owner, _, leaf = name.rpartition(".")
        on_device = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(on_device, requires_grad=False))
    # Only buffers are left to move: fixed tables, made on the CPU in float32.
    model.to(device=device, dtype=dtype)
    return model.eval(), digest.hexdigest()


def open_weights(config: EncoderConfig) -> StoredWeights:
    """Find and check the stored weights of `config.source` without reading them.

    Raises:
        CheckpointMismatch: a file that is missing or broken; or tensors that are missing, left over under our prefixes,
            or of another shape or kind than the configuration says, all of them listed in one message.
    """
    expected = {name: tuple(weight.shape) for name, weight in _empty_model(config).state_dict().items()}
    if is_demo_spec(config.source):
        tensors = {name: Stored(shape, "BF16") for name, shape in sorted(expected.items())}
        return StoredWeights(tensors, lambda name: demo_tensor(config.source, name, expected[name]))
    files = find_tensors(Path(config.source))
    problems = []
    tensors = {}
    for path in sorted(set(files.values())):
        names = [name for name in files if files[name] == path]
        if not path.exists():
            problems.append(f"{path.name} is missing, it holds {len(names)} of the tensors: {', '.join(sorted(names))}")
            continue
        handle = open_safetensors(path)
        present = set(handle.keys())
        for name in names:
            if name in present:
                view = handle.get_slice(name)
                tensors[name] = Stored(tuple(view.get_shape()), view.get_dtype())
            else:
                problems.append(f"{name} is not in {path.name}, where the index places it")
    problems += [f"{name} is missing" for name in sorted(expected.keys() - files.keys())]
    problems += _misfits(tensors, expected)
    if problems:
        raise CheckpointMismatch("\n  ".join([f"{config.source} does not fit its config.json:", *problems]))

    def read(name: str) -> Tensor:
        # A handle of its own for each tensor: the mapping, and the pages read through it, go away with the tensor.
        tensor: Tensor = open_safetensors(files[name]).get_tensor(name)
        return tensor

    return StoredWeights(dict(sorted(tensors.items())), read)


def _misfits(tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = []
    for name, stored in sorted(tensors.items()):
        if name not in expected:
            problems.append(f"{name} is left over: the configuration has no such tensor")
        elif stored.shape != expected[name]:
            problems.append(f"{name} has shape {list(stored.shape)}, expected {list(expected[name])}")
        elif stored.dtype not in STORED_DTYPES:
            problems.append(f"{name} is stored as {stored.dtype}, readable: {', '.join(STORED_DTYPES)}")
    return problems


def _empty_model(config: EncoderConfig) -> MoonViT3d:
    """Shapes only: the parameters are on the meta device and take no memory."""
    with torch.device("meta"):
        return MoonViT3d(config)


def _hash_tensor(digest: "hashlib._Hash", name: str, tensor: Tensor) -> None:
    """Add one tensor: a JSON line of name, dtype and shape, then its little-endian bytes."""
    line = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)], separators=(",", ":"))
    digest.update(line.encode() + b"\n")
    digest.update(tensor_bytes(tensor))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a CPU tensor, not copied if it is contiguous."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array.data
