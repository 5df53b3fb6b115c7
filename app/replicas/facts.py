"""What a tower is made from, and what it says of itself once it is loaded."""

import os
from dataclasses import dataclass, field

import torch

from app.device import dtype_name
from encoder import Engine
from encoder.capacity import patches_that_fit


@dataclass(frozen=True)
class TowerSpec:
    """What a worker loads. Names, as in the settings; `threads` is None where PyTorch decides.

    Attributes:
        threads: of the CPU, for one operation.
        log_level, log_format: as in the settings.
    """

    model: str
    device: str
    dtype: torch.dtype
    attention_backend: str = "auto"
    rms_norm_eps: float | None = None
    quantization: str | None = None
    preprocess_device: str = "auto"
    cuda_graphs: bool | None = None
    threads: int | None = None
    log_level: str = "info"
    log_format: str = "json"

    def load(self) -> Engine:
        """An engine, warmed up.

        Raises:
            EncoderError: as `Engine.load`.
        """
        engine = Engine.load(
            self.model,
            device=self.device,
            dtype=self.dtype,
            attention_backend=self.attention_backend,
            rms_norm_eps=self.rms_norm_eps,
            quantization=self.quantization,
            preprocess_device=self.preprocess_device,
            cuda_graphs=self.cuda_graphs,
        )
        engine.warm_up()
        return engine


@dataclass(frozen=True)
class TowerFacts:
    """A loaded tower; plain values only, since they cross between processes.

    Attributes:
        device: as PyTorch writes it, e.g. cuda:0.
        device_name: of the product, where it has one.
        dtype: of the computation and the result.
        quantization: of the products: "fp8" or None.
        attention, refused, self_test: see `encoder.attention.Attention`.
        rules: (which batches, on which attention backend), the first that fits counts.
        graph_buckets: patches of the batches that are launched as graphs.
        defers_preprocessing: see `Engine`.
        patches_that_fit: into the device's free memory, in one batch; None where that is not asked.
    """

    pid: int
    device: str
    device_name: str
    dtype: str
    fingerprint: str
    weights_sha256: str
    attention: str
    refused: dict[str, str] = field(default_factory=dict)
    self_test: dict[str, float] = field(default_factory=dict)
    rules: tuple[tuple[str, str], ...] = ()
    graph_buckets: tuple[int, ...] = ()
    quantization: str | None = None
    defers_preprocessing: bool = False
    patches_that_fit: int | None = None

    @classmethod
    def of(cls, engine: Engine) -> "TowerFacts":
        return cls(
            pid=os.getpid(),
            device=str(engine.device),
            device_name=device_name(engine.device),
            dtype=dtype_name(engine.dtype),
            fingerprint=engine.fingerprint,
            weights_sha256=engine.weights_sha256,
            attention=engine.attention.name,
            refused=dict(engine.attention.refused),
            self_test=dict(engine.attention.self_test),
            rules=tuple(engine.attention_rules()),
            graph_buckets=tuple(engine.graphs.buckets) if engine.graphs else (),
            quantization=engine.quantization,
            defers_preprocessing=engine.defers_preprocessing,
            patches_that_fit=patches_that_fit(engine),
        )


@dataclass(frozen=True)
class TowerStatus:
    """A tower at this moment.

    Attributes:
        device: where it runs.
        state: "starting", "up", "restarting" or "stopped".
        pid: of its process; None while there is none.
        restarts: processes that were replaced so far.
        outstanding_patches: of the batches it has been given and not answered.
        attention: the backend in service; None before it was loaded.
        out_of_service: backends that served and failed -> why, see `encoder.attention.Attention`.
    """

    device: str
    state: str
    pid: int | None
    restarts: int
    outstanding_patches: int
    attention: str | None
    out_of_service: dict[str, str] = field(default_factory=dict)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
