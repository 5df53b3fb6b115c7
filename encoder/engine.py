"""`Engine`: one model on one device. Loads in a fixed order, runs packed batches, translates the device's errors."""

import hashlib
import importlib.util
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from encoder import attention, device_pixels
from encoder.checkpoint import load_config
from encoder.config import EncoderConfig
from encoder.device import check_present, current, device_errors, dtype_name, parse_device, parse_dtype
from encoder.device_pixels_plain import expand
from encoder.errors import EncoderError, NonFiniteResult, NoUsableBackend
from encoder.fusion import choose_ops, choose_row_ops
from encoder.grid import Grid
from encoder.model import MoonViT3d
from encoder.quantization import check_quantization, quantize
from encoder.segments import PackedBatch, Segment, pack, split
from encoder.transfers import Transfers
from encoder.weights import load_model

if TYPE_CHECKING:
    from encoder.graphs import BlockGraphs

logger = logging.getLogger(__name__)

NOT_FINITE = "gave values that are not finite"


@dataclass(frozen=True, eq=False)
class Engine:
    """One model, ready to run. One thread at a time calls its methods; another may wait for what was submitted.

    A batch whose result is not finite, or that an attention backend fails on, is run again: small batches without their
    graph, then on the other backends that may run here. What failed where another gave finite numbers is taken out of
    service, and the other one stays in its place. Only where none gives finite numbers the batch fails.

    Attributes:
        dtype: of the weights, the computation and the result.
        attention: the backend in service, what it was chosen from and how exact it was at start.
        weights_sha256: hex SHA-256 of the stored vision tensors, sorted by name: for each a JSON line of name, dtype
            and shape, then its bytes. The same for every device and compute dtype.
        fingerprint: hex SHA-256 of what decides the result: weights, family, vision configuration, compute dtype and
            what is computed in 8 bits.
        transfers: the copies to and from a GPU.
        graphs: of the blocks for small batches, where they are wanted and can be had; `warm_up` captures them.
        quantization: of the products: "fp8" or None.
        pixels: what makes patches of pictures on a GPU; None where the CPU does.
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
    quantization: str | None = None
    pixels: device_pixels.DevicePixels | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # who waits may have to launch again

    @classmethod
    def load(
        cls,
        path_or_demo_spec: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        attention_backend: str = "auto",
        rms_norm_eps: float | None = None,
        quantization: str | None = None,
        cuda_graphs: bool | None = None,
        preprocess_device: str = "auto",
    ) -> "Engine":
        """Load a checkpoint directory or a demo model.

        Names are checked first; then weights are read; the attention kernels are tested on the device last.

        Args:
            dtype: "bfloat16", "float16", "float32" or the torch dtype; None is bfloat16 on a GPU, float32 on a CPU.
            attention_backend: "auto" or a name of `encoder.attention.BACKENDS`.
            rms_norm_eps: of the tower's RMSNorms, where the reference's 2**-23 is not wanted.
            quantization: "fp8" for products in 8 bits, on a GPU of compute capability 8.9 or later in bfloat16.
            cuda_graphs: launch the blocks of small batches as graphs, on a GPU with Triton, once `warm_up` has captured
                them. Their attention is `triton`, so None means: where `auto` or `triton` is the backend, or
                `flashinfer_fp8`, which is for long segments.
            preprocess_device: where patches of deferred segments are made: "cpu", "cuda", or "auto": on a GPU with
                Triton, where the result is that of the CPU to the last bit.
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
        check_quantization(quantization, target, compute)
        device_pixels.check_wanted(preprocess_device, target)
        with device_errors(), current(target):
            model, weights_sha256 = load_model(config, device=target, dtype=compute)
            model.ops = choose_ops(config, target, compute)
            if quantization is not None:
                quantize(model, choose_row_ops(config, target, compute))
            chosen = attention.start(
                resolution, num_heads=vision.num_heads, head_dim=vision.head_dim, device=target, dtype=compute
            )
            transfers = Transfers(target) if target.type == "cuda" else None
            with_graphs = chosen.configured == "auto" or chosen.name in ("triton", "flashinfer_fp8")
            wanted = with_graphs if cuda_graphs is None else cuda_graphs
            graphs = _graphs(model, target, compute) if wanted else None
            pixels = device_pixels.choose(preprocess_device, config, target)
        logger.info(
            "loaded %s%s on %s in %s%s, attention %s",
            config.source,
            " (demo weights: embeddings mean nothing)" if config.is_demo else "",
            target,
            dtype_name(compute),
            f", products in {quantization}" if quantization else "",
            chosen.name,
        )
        return cls(
            config=config,
            device=target,
            dtype=compute,
            attention=chosen,
            weights_sha256=weights_sha256,
            fingerprint=fingerprint(config, weights_sha256, compute, _roundings(quantization, chosen.name)),
            quantization=quantization,
            model=model,
            transfers=transfers,
            graphs=graphs,
            pixels=pixels,
        )

    @property
    def defers_preprocessing(self) -> bool:
        """Whether `defer_image` and `defer_frames` save work here. Deferred segments run on every engine."""
        return self.pixels is not None

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
        embeddings = self._start(batch)
        with self._at_work():
            # The one point where the host waits for the device, so errors of queued kernels surface here too.
            finite = _all_finite(_extremes(embeddings))
        return embeddings if finite else self._run_elsewhere(batch, NOT_FINITE)

    def run_to_host(self, batch: PackedBatch) -> Tensor:
        """As `run`, with the result in host memory; pinned if it comes from a GPU."""
        return self.submit(batch)()

    def submit(self, batch: PackedBatch, out: Tensor | None = None) -> Callable[[], Tensor]:
        """Queue a batch and come back before a GPU has run it; the call that is returned waits and gives its result.

        One more batch may be submitted before the first is waited for: its copies then run beside the computation.

        Args:
            out: (M, E) in the engine's dtype on the host, to be filled and returned; None makes a new one.
        Returns:
            A call that gives (M, E) on the host, once, or raises what `run` raises.
        Raises:
            DeviceOutOfMemory, DeviceFailed: as `run`.
        """
        if self.transfers is None or not len(batch):
            embeddings = self.run(batch).to("cpu") if out is None else out.copy_(self.run(batch))
            return lambda: embeddings
        on_device = self._start(batch)
        with self._at_work():
            wait = self.transfers.download(on_device, _extremes(on_device), out=out)
        del on_device

        def result() -> Tensor:
            with self._at_work():
                on_host, extremes = wait()
                if _all_finite(extremes):
                    return on_host
                return on_host.copy_(self._run_elsewhere(batch, NOT_FINITE))

        return result

    def forward(self, batch: PackedBatch) -> Tensor:
        """(M, E) on the device, where its computation is queued and its values are not checked; for measurements."""
        with torch.inference_mode(), current(self.device):
            return self._forward(batch)

    def _start(self, batch: PackedBatch) -> Tensor:
        """(M, E) on the device, queued."""
        with self._lock:
            try:
                with self._at_work():
                    return self._forward(batch)
            except EncoderError:
                raise
            except Exception as error:  # whatever a backend raises on this batch, another may take it
                logger.warning("batch of %d segments failed", len(batch), exc_info=True)
                return self._run_elsewhere(batch, f"raised {type(error).__name__}", error)

    def _run_elsewhere(self, batch: PackedBatch, reason: str, error: Exception | None = None) -> Tensor:
        """(M, E) on the device, finite, computed in another way than first tried, which is then taken out of service.

        Raises:
            NonFiniteResult, or `error` where that is what happened: no other way gives finite numbers.
        """
        with self._lock:
            tried = [self.attention_for(batch.lengths)]
            if self.graphs is not None and self.graphs.fits(batch.lengths):
                eager = self.attention.choose(batch.lengths)
                if (embeddings := self._try(batch, eager)) is not None:
                    logger.error("CUDA graphs are out of service: %s", reason)
                    self.graphs.retire()
                    return embeddings
                tried = [eager]
            for name in self.attention.others(tried[0]):
                tried.append(name)
                if (embeddings := self._try(batch, name)) is not None:
                    self.attention.take_out(tried[0], reason, name)
                    return embeddings
        raise error or NonFiniteResult(
            f"batch of {len(batch)} segments, {sum(batch.lengths)} patches: the result holds values that are not "
            f"finite (attention {', '.join(tried)}; {dtype_name(self.dtype)})"
        )

    def _try(self, batch: PackedBatch, attention_name: str) -> Tensor | None:
        """(M, E) on the device, or None where this backend fails on it or gives values that are not finite."""
        try:
            with self._at_work():
                embeddings = self._forward(batch, attention_name)
                return embeddings if _all_finite(_extremes(embeddings)) else None
        except EncoderError:
            raise
        except Exception:
            logger.warning("attention backend %s failed on a batch", attention_name, exc_info=True)
            return None

    def _forward(self, batch: PackedBatch, attention_name: str | None = None) -> Tensor:
        """On the backend of that name and launch by launch, or as the batch's shape asks for."""
        pixel_values = self._pixel_values(batch)
        if attention_name is None and self.graphs is not None and self.graphs.fits(batch.lengths):
            x, rope = self.model.embed(pixel_values, batch.grids)
            return self.model.project(self.graphs.run(x, rope, batch.lengths), batch.grids)
        attend = self.attention.plan(
            batch.lengths, self._upload(torch.tensor(batch.cu_seqlens, dtype=torch.int32, device="cpu")), attention_name
        )
        embeddings: Tensor = self.model(pixel_values, batch.grids, attend)
        return embeddings

    def _pixel_values(self, batch: PackedBatch) -> Tensor:
        """(L, 3, P, P) on the device, after one copy. Pictures become patches there where that is in service."""
        staged = batch.staged
        if staged is None:
            return self._upload(batch.pixel_values)
        if self.pixels is None:
            return self._upload(expand(staged, self.config.media.transparent_background))
        return self.pixels.expand(staged, self._upload(staged.buffer))

    def _upload(self, host: Tensor) -> Tensor:
        return host.to(self.device) if self.transfers is None else self.transfers.upload(host)

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

    def attention_rules(self) -> list[tuple[str, str]]:
        """(which batches, on which attention), the first that fits counts: what `attention_for` goes by."""
        rules = self.attention.rules()
        if self.graphs is not None and self.graphs.buckets:
            return [(f"up to {max(self.graphs.buckets)} patches, as a CUDA graph", "triton"), *rules]
        return rules

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


def fingerprint(config: EncoderConfig, weights_sha256: str, dtype: torch.dtype, quantization: str | None = None) -> str:
    """Hex SHA-256 over the canonical JSON (sorted keys, no spaces) of everything that decides an embedding's values."""
    content = {
        "weights_sha256": weights_sha256,
        "family": config.family,
        "vision": asdict(config.vision),
        "dtype": dtype_name(dtype),
        "quantization": quantization,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _roundings(quantization: str | None, attention_name: str) -> str | None:
    """What is computed in 8 bits, for the fingerprint: "fp8" products, "fp8_attention", both or None."""
    parts = [quantization, "fp8_attention" if attention_name == "flashinfer_fp8" else None]
    return "+".join(part for part in parts if part) or None


def _all_finite(extremes: Tensor) -> bool:
    return all(map(math.isfinite, extremes.tolist()))


def _extremes(embeddings: Tensor) -> Tensor:
    """(2,) least and largest value, both NaN if any is: one pass tells whether all are finite."""
    return torch.stack(torch.aminmax(embeddings))


def _graphs(model: MoonViT3d, device: torch.device, dtype: torch.dtype) -> "BlockGraphs | None":
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from encoder.graphs import BlockGraphs

    return BlockGraphs(model, device, dtype)
