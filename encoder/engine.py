"""`Engine`: one model on one device. Loads in a fixed order, runs packed batches, translates the device's errors."""

import hashlib
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoder import attention
from encoder.checkpoint import load_config
from encoder.config import EncoderConfig
from encoder.device import check_present, current, device_errors, dtype_name, parse_device, parse_dtype
from encoder.errors import NonFiniteResult, NoUsableBackend
from encoder.fusion import choose_ops
from encoder.grid import Grid
from encoder.model import MoonViT3d
from encoder.segments import PackedBatch, Segment, pack, split
from encoder.transfers import Transfers
from encoder.weights import load_model

if TYPE_CHECKING:
    from encoder.graphs import BlockGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Engine:
    """One model, ready to run. Not thread-safe: one thread at a time calls `run`, `encode` and `warm_up`.

    Attributes:
        dtype: of the weights, the computation and the result.
        attention: the backend in service, what it was chosen from and how exact it was at start.
        weights_sha256: hex SHA-256 of the stored vision tensors, sorted by name: for each a JSON line of name, dtype
            and shape, then its bytes. The same for every device and compute dtype.
        fingerprint: hex SHA-256 of what decides the result: weights, family, vision configuration, compute dtype.
        transfers: the copies to and from a GPU.
        graphs: of the blocks for small batches, where they are wanted and can be had; `warm_up` captures them.
    """

    config: EncoderConfig
    device: torch.device
    dtype: torch.dtype
    attention: attention.Attention
    weights_sha256: str
    fingerprint: str
    model: MoonViT3d
    transfers: Transfers | None = None
    graphs: "BlockGraphs | None" = None

    @classmethod
    def load(
        cls,
        path_or_demo_spec: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        attention_backend: str = "auto",
        rms_norm_eps: float | None = None,
        cuda_graphs: bool | None = None,
    ) -> "Engine":
        """Load a checkpoint directory or a demo model.

        Names are checked first; then weights are read; the attention kernels are tested on the device last.

        Args:
            dtype: "bfloat16", "float16", "float32" or the torch dtype; None is bfloat16 on a GPU, float32 on a CPU.
            attention_backend: "auto" or a name of `encoder.attention.BACKENDS`.
            rms_norm_eps: of the tower's RMSNorms, where the reference's 2**-23 is not wanted.
            cuda_graphs: launch the blocks of small batches as graphs, on a GPU with Triton, once `warm_up` has captured
                them. Their attention is `triton`, so None means: where `auto` or `triton` is the backend.
        Raises:
            SetupError: a device or dtype that is not there; CheckpointMismatch, UnknownBackend, NoUsableBackend.
            DeviceFailed, DeviceOutOfMemory: the device failed, or is too small for the weights.
        """
        config = load_config(path_or_demo_spec, rms_norm_eps=rms_norm_eps)
        target = parse_device(device)
        compute = parse_dtype(dtype, target)
        vision = config.vision
        try:
            resolution = attention.resolve(
                attention_backend, device=target, dtype=compute, head_dim=vision.head_dim, family=config.family
            )
        except NoUsableBackend:
            check_present(target)  # the better explanation, if that is the reason
            raise
        check_present(target)
        with device_errors(), current(target):
            model, weights_sha256 = load_model(config, device=target, dtype=compute)
            model.ops = choose_ops(config, target, compute)
            chosen = attention.start(
                resolution, num_heads=vision.num_heads, head_dim=vision.head_dim, device=target, dtype=compute
            )
            transfers = Transfers(target) if target.type == "cuda" else None
            wanted = chosen.configured == "auto" or chosen.name == "triton" if cuda_graphs is None else cuda_graphs
            graphs = _graphs(model, target, compute) if wanted else None
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
            transfers=transfers,
            graphs=graphs,
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
        with self._at_work():
            embeddings = self._forward(batch)
            # The one point where the host waits for the device, so errors of queued kernels surface here too.
            extremes = _extremes(embeddings).tolist()
        self._refuse_non_finite(batch, extremes)
        return embeddings

    def run_to_host(self, batch: PackedBatch) -> Tensor:
        """As `run`, with the result in host memory; pinned if it comes from a GPU."""
        return self.submit(batch)()

    def submit(self, batch: PackedBatch) -> Callable[[], Tensor]:
        """Queue a batch and come back before a GPU has run it; the call that is returned waits and gives its result.

        One more batch may be submitted before the first is waited for: its copies then run beside the computation.

        Returns:
            A call that gives (M, E) on the host, once, or raises what `run` raises.
        Raises:
            DeviceOutOfMemory, DeviceFailed: as `run`.
        """
        if self.transfers is None or not len(batch):
            embeddings = self.run(batch).to("cpu")
            return lambda: embeddings
        with self._at_work():
            on_device = self._forward(batch)
            wait = self.transfers.download(on_device, _extremes(on_device))

        def result() -> Tensor:
            with self._at_work():
                on_host, extremes = wait()
            self._refuse_non_finite(batch, extremes.tolist())
            return on_host

        return result

    def forward(self, batch: PackedBatch) -> Tensor:
        """(M, E) on the device, where its computation is queued and its values are not checked; for measurements."""
        with torch.inference_mode(), current(self.device):
            return self._forward(batch)

    def _forward(self, batch: PackedBatch) -> Tensor:
        pixel_values = self._upload(batch.pixel_values)
        if self.graphs is not None and self.graphs.fits(batch.lengths):
            x, rope = self.model.embed(pixel_values, batch.grids)
            return self.model.project(self.graphs.run(x, rope, batch.lengths), batch.grids)
        attend = self.attention.plan(
            batch.lengths, self._upload(torch.tensor(batch.cu_seqlens, dtype=torch.int32, device="cpu"))
        )
        embeddings: Tensor = self.model(pixel_values, batch.grids, attend)
        return embeddings

    def _upload(self, host: Tensor) -> Tensor:
        return host.to(self.device) if self.transfers is None else self.transfers.upload(host)

    def _refuse_non_finite(self, batch: PackedBatch, extremes: Sequence[float]) -> None:
        if not all(map(math.isfinite, extremes)):
            raise NonFiniteResult(
                f"batch of {len(batch)} segments, {sum(batch.lengths)} patches: the result holds values that are not "
                f"finite (attention {self.attention_for(batch.lengths)}, {dtype_name(self.dtype)})"
            )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        # Without a caller's autocast: the dtype is part of what the fingerprint stands for.
        exact = torch.autocast(self.device.type, enabled=False)
        with device_errors(), torch.inference_mode(), exact, current(self.device):
            yield

    def attention_for(self, lengths: Sequence[int]) -> str:
        """Name of the attention that a batch of segments of so many patches runs on."""
        if self.graphs is not None and self.graphs.fits(lengths):
            return "triton"
        return self.attention.choose(lengths)

    def encode(self, segments: Iterable[Segment]) -> list[Tensor]:
        """Encode any mix of images and video chunks as one batch: one (m_i, E) for each segment, none for none.

        The tensors are ordinary ones, each with memory of its own: to be written to, saved or trained on.

        Raises:
            InvalidSegment: one that this model cannot take; names its position.
            DeviceOutOfMemory, DeviceFailed, NonFiniteResult: see `run`.
        """
        batch = pack(segments, self.config)
        return [rows.clone() for rows in split(self.run(batch), batch)]

    def warm_up(self) -> None:
        """Run a small batch, an image beside a video chunk, so that libraries and kernels are loaded before traffic."""
        if self.graphs is not None:
            with self._at_work():
                self.graphs.capture()
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


def _extremes(embeddings: Tensor) -> Tensor:
    """(2,) least and largest value, both NaN if any is: one pass tells whether all are finite."""
    return torch.stack(torch.aminmax(embeddings))


def _graphs(model: MoonViT3d, device: torch.device, dtype: torch.dtype) -> "BlockGraphs | None":
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from encoder.graphs import BlockGraphs

    return BlockGraphs(model, device, dtype)
