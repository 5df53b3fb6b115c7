"""`Engine`: one model on one device. Loads in a fixed order, runs packed batches, translates the device's errors."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from encoder import attention
from encoder.checkpoint import load_config
from encoder.config import EncoderConfig
from encoder.errors import DeviceFailed, DeviceOutOfMemory, NonFiniteResult, NoUsableBackend, SetupError
from encoder.grid import Grid
from encoder.model import MoonViT3d
from encoder.segments import PackedBatch, Segment, pack, split
from encoder.weights import load_model

logger = logging.getLogger(__name__)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, eq=False)
class Engine:
    """One model, ready to run. Not thread-safe: one thread at a time calls `run`, `encode` and `warm_up`.

    Attributes:
        dtype: of the weights, the computation and the result.
        attention: the backend in service, what it was chosen from and how exact it was at start.
        weights_sha256: hex SHA-256 of the stored vision tensors, sorted by name: for each a JSON line of name, dtype
            and shape, then its bytes. The same for every device and compute dtype.
        fingerprint: hex SHA-256 of what decides the result: weights, family, vision configuration, compute dtype.
    """

    config: EncoderConfig
    device: torch.device
    dtype: torch.dtype
    attention: attention.Attention
    weights_sha256: str
    fingerprint: str
    model: MoonViT3d

    @classmethod
    def load(
        cls,
        path_or_demo_spec: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        attention_backend: str = "auto",
        rms_norm_eps: float | None = None,
    ) -> "Engine":
        """Load a checkpoint directory or a demo model.

        Names are checked first; then weights are read; the attention kernels are tested on the device last.

        Args:
            dtype: "bfloat16", "float16", "float32" or the torch dtype; None is bfloat16 on a GPU, float32 on a CPU.
            attention_backend: "auto" or a name of `encoder.attention.BACKENDS`.
            rms_norm_eps: of the tower's RMSNorms, where the reference's 2**-23 is not wanted.
        Raises:
            SetupError: a device or dtype that is not there; CheckpointMismatch, UnknownBackend, NoUsableBackend.
            DeviceFailed, DeviceOutOfMemory: the device failed, or is too small for the weights.
        """
        config = load_config(path_or_demo_spec, rms_norm_eps=rms_norm_eps)
        target = _parse_device(device)
        compute = _parse_dtype(dtype, target)
        vision = config.vision
        try:
            resolution = attention.resolve(
                attention_backend, device=target, dtype=compute, head_dim=vision.head_dim, family=config.family
            )
        except NoUsableBackend:
            _check_present(target)  # the better explanation, if that is the reason
            raise
        _check_present(target)
        with device_errors():
            model, weights_sha256 = load_model(config, device=target, dtype=compute)
            chosen = attention.start(
                resolution, num_heads=vision.num_heads, head_dim=vision.head_dim, device=target, dtype=compute
            )
        logger.info(
            "loaded %s%s on %s in %s, attention %s",
            config.source,
            " (demo weights: embeddings mean nothing)" if config.is_demo else "",
            target,
            dtype_name(compute),
            chosen.name,
        )
        return cls(
            config=config,
            device=target,
            dtype=compute,
            attention=chosen,
            weights_sha256=weights_sha256,
            fingerprint=fingerprint(config, weights_sha256, compute),
            model=model,
        )

    def run(self, batch: PackedBatch) -> Tensor:
        """Encode one packed batch.

        Returns:
            (M, E) on the engine's device, in its dtype; `split` cuts it into one tensor a segment.
        Raises:
            DeviceOutOfMemory: the batch did not fit; a smaller one may.
            DeviceFailed: the device is unusable from now on.
            NonFiniteResult: a value of the result is not finite.
        """
        if not len(batch):
            return torch.empty((0, self.config.vision.text_hidden_size), dtype=self.dtype, device=self.device)
        with device_errors(), torch.inference_mode():
            cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32).to(self.device, non_blocking=True)
            attend = self.attention.plan(batch.lengths, cu_seqlens)
            pixel_values = batch.pixel_values.to(self.device, non_blocking=True)
            embeddings: Tensor = self.model(pixel_values, batch.grids, attend)
            # The one point where the host waits for the device, so errors of queued kernels surface here too.
            finite = bool(embeddings.isfinite().all())
        if not finite:
            raise NonFiniteResult(
                f"batch of {len(batch)} segments, {sum(batch.lengths)} patches: the result holds values that are not "
                f"finite (attention {self.attention.name}, {dtype_name(self.dtype)})"
            )
        return embeddings

    def encode(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Encode any mix of images and video chunks as one batch: one (m_i, E) for each segment, none for none.

        Raises:
            InvalidSegment: one that this model cannot take; names its position.
            DeviceOutOfMemory, DeviceFailed, NonFiniteResult: see `run`.
        """
        batch = pack(segments, self.config)
        return split(self.run(batch), batch)

    def warm_up(self) -> None:
        """Run a small batch, an image beside a video chunk, so that libraries and kernels are loaded before traffic."""
        patch = self.config.vision.patch_size
        grids = [Grid(1, 2, 2), Grid(self.config.vision.pos_emb_time, 4, 6)]
        self.encode([Segment(torch.zeros((g.num_patches, 3, patch, patch), dtype=torch.uint8), g) for g in grids])


def fingerprint(config: EncoderConfig, weights_sha256: str, dtype: torch.dtype) -> str:
    """Hex SHA-256 over the canonical JSON (sorted keys, no spaces) of everything that decides an embedding's values."""
    content = {
        "weights_sha256": weights_sha256,
        "family": config.family,
        "vision": asdict(config.vision),
        "dtype": dtype_name(dtype),
        "quantization": None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def device_errors() -> Iterator[None]:
    """The one place where PyTorch's device errors become ours; anything else passes through."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory("the device ran out of memory") from error
    except RuntimeError as error:  # torch.AcceleratorError is one, and older PyTorch raises it bare
        text = str(error)
        if "DefaultCPUAllocator" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text:
            raise DeviceOutOfMemory("the device ran out of memory") from error
        if isinstance(error, _AcceleratorError) or any(mark in text for mark in _DEVICE_FAILURES):
            raise DeviceFailed("the device reported an error and cannot be used any more") from error
        raise


_AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8
_DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse_device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SetupError(f"device {device!r} is not one; examples: cpu, cuda, cuda:1") from error
    if parsed.type not in ("cpu", "cuda"):
        raise SetupError(f"device {device!r}: only cpu and cuda are supported")
    return parsed


def _parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    parsed = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in DTYPES.values():
        raise SetupError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return parsed


def _check_present(device: torch.device) -> None:
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise SetupError(f"device {device} is not there: PyTorch {torch.__version__} sees {count} CUDA devices")
