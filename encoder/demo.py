"""Demo models: the real architectures with made-up weights, the same bits on every machine.

They exist so that everything around the weights can be run and tested without a checkpoint; what they encode means
nothing. A tensor's values depend on the spec and its name alone, so the order of generation does not matter.
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoder.config import DEMO_KEY
from encoder.errors import CheckpointMismatch
from encoder.families import FAMILY_MEDIA, Family

DEMO_PREFIX = "demo:"

# Same head sizes (128 and 72), positions and rules as the full models; a few blocks and narrow layers.
_K3_TINY = {
    "vt_hidden_size": 128,
    "qkv_hidden_size": 256,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 3,
    "vt_intermediate_size": 256,
    "mm_hidden_size": 128,
    "text_hidden_size": 256,
}
_K25_TINY = {
    "vt_hidden_size": 144,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 304,
    "mm_hidden_size": 144,
    "text_hidden_size": 256,
}

# spec -> family and what its vision_config changes of the family's released values
DEMO_MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "demo:k3-tiny": ("kimi_k3", _K3_TINY),
    "demo:k25-tiny": ("kimi_k25", _K25_TINY),
    "demo:k3": ("kimi_k3", {}),
    "demo:k25": ("kimi_k25", {}),
}

# Values made at a time: in cache, and too few for PyTorch to wake threads, which a busy machine delays.
_CHUNK = 1 << 15


def is_demo_spec(spec: str) -> bool:
    return spec.startswith(DEMO_PREFIX)


def demo_config(spec: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `preprocessor_config.json` of a demo model.

    Raises:
        CheckpointMismatch: no such demo model.
    """
    if spec not in DEMO_MODELS:
        raise CheckpointMismatch(f"no demo model {spec!r}, there are: {', '.join(DEMO_MODELS)}")
    family, vision = DEMO_MODELS[spec]
    config = {"model_type": family, "media_placeholder_token_id": 163605, "vision_config": vision, DEMO_KEY: True}
    return config, {"media_proc_cfg": FAMILY_MEDIA[family]}


def demo_tensor(spec: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """One weight of a demo model, bfloat16 on the CPU.

    Uniform 16-bit integers from SFC64, whose whole 256-bit state is the SHA-256 of spec and name, times one float32
    factor, rounded to bfloat16: integer and single IEEE operations only, hence the same bits everywhere.
    """
    centre, deviation = _moments(name, shape)
    # Integers n + 1/2 from -32767.5 to 32767.5 have the deviation 65536 / sqrt(12).
    factor = np.float32(deviation) * np.sqrt(np.float32(12)) / np.float32(65536)
    stream = _stream(f"{spec}/{name}")
    out = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        raw = stream.random_raw(-(-part.numel() // 4)).astype("<u8", copy=False)
        integers = torch.from_numpy(raw.view("<i2").astype(np.float32)[: part.numel()])
        part.copy_(integers.add_(0.5).mul_(float(factor)).add_(centre))
    return out


def _stream(seed: str) -> np.random.SFC64:
    stream = np.random.SFC64(0)
    state = stream.state
    state["state"]["state"] = np.frombuffer(hashlib.sha256(seed.encode()).digest(), dtype="<u8").astype(np.uint64)
    stream.state = state
    return stream


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation that keep activations near one through every block."""
    if name.endswith("pos_emb.weight"):
        return 0.0, 0.5
    if len(shape) > 1:  # a linear map, or the patch projection: outputs as large as inputs
        return 0.0, float(np.float32(1) / np.sqrt(np.float32(np.prod(shape[1:]))))
    return (1.0, 0.1) if "norm" in name and name.endswith("weight") else (0.0, 0.1)
