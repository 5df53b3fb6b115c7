"""MoonViT3d vision encoder (Kimi-K3, K2.5, K2.6) as a plain library: preprocessing, packing, tower, projector.

engine = Engine.load("demo:k3-tiny")
embeddings = engine.encode([preprocess_image(picture, engine.config)])
"""

from encoder.checkpoint import load_config
from encoder.config import EncoderConfig
from encoder.engine import Engine
from encoder.errors import (
    CheckpointMismatch,
    DeviceFailed,
    DeviceOutOfMemory,
    EncoderError,
    InputError,
    InvalidSegment,
    NonFiniteResult,
    NoUsableBackend,
    SetupError,
    Unavailable,
    UnknownBackend,
)
from encoder.grid import Grid, VideoPlan, flops, largest_segment, num_tokens, plan_video
from encoder.picture import Picture
from encoder.preprocess import (
    PREPROCESSING_VERSION,
    defer_frames,
    defer_image,
    preprocess_frames,
    preprocess_image,
)
from encoder.segments import PackedBatch, Segment, pack, split

__all__ = [
    "PREPROCESSING_VERSION",
    "CheckpointMismatch",
    "DeviceFailed",
    "DeviceOutOfMemory",
    "EncoderConfig",
    "EncoderError",
    "Engine",
    "Grid",
    "InputError",
    "InvalidSegment",
    "NoUsableBackend",
    "NonFiniteResult",
    "PackedBatch",
    "Picture",
    "Segment",
    "SetupError",
    "Unavailable",
    "UnknownBackend",
    "VideoPlan",
    "defer_frames",
    "defer_image",
    "flops",
    "largest_segment",
    "load_config",
    "num_tokens",
    "pack",
    "plan_video",
    "preprocess_frames",
    "preprocess_image",
    "split",
]
