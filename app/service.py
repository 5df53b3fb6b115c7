"""`Service`: everything one process serves with, and how it comes up and goes down."""

import asyncio
import os
import time

import structlog
import torch
from torch import Tensor

from app.batcher import Batcher, Run
from app.decode import Decoder, Jobs, Kind
from app.device import compute_dtype, dtype_name, resolve_device
from app.fetch import Fetcher
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.pipeline import Pipeline
from app.policies import batch_budget, decode_limits, disk_tier, fetch_policy, shared_tier
from app.problems import PROBLEMS
from app.settings import Settings
from app.store import EmbeddingStore, StoreStats
from encoder import DeviceFailed, EncoderError, Engine, PackedBatch, attention, load_config

logger = structlog.get_logger("moonvit.service")

MODEL_NAMES = {"kimi_k3": "kimi-k3", "kimi_k25": "kimi-k2.5"}
QUEUED_BATCHES = 16  # default bound of the queue: about the work of half a minute on a busy GPU
MAX_FILM_WORKERS = 8  # by default: each may hold gigabytes of frames
PICTURE_STALL_S = 30.0  # the slowest picture within the limits takes about five
GPU_STALL_S = 60.0  # the largest batch takes 1.3 s on an H200


class Service:
    """Built from settings alone; `start` loads the weights, `stop` gives everything back.

    The constructor checks names, predicates and the checkpoint's JSON; it reads no weights and touches no device.

    Args:
        run: in place of the tower, in tests: (L, 3, P, P) patches -> (M, E).
    Raises:
        SetupError: a configuration that cannot work.
    """

    def __init__(self, settings: Settings, run: Run | None = None) -> None:
        self.settings = settings
        self.config = load_config(settings.model, rms_norm_eps=settings.rms_norm_eps)
        self.model_name = settings.served_model_name or MODEL_NAMES[self.config.family]
        self.created_s = int(time.time())
        self.lifecycle = Lifecycle(settings.max_requests, settings.max_inflight_bytes)
        self.metrics = Metrics(problem.code for problem in PROBLEMS.values())
        self.engine: Engine | None = None
        self._run = run
        self._batcher: Batcher | None = None
        self._pipeline: Pipeline | None = None
        self.max_batch_patches = batch_budget(settings, self.config)
        self.max_queued_patches = settings.max_queued_patches or QUEUED_BATCHES * self.max_batch_patches
        self._device = resolve_device(settings.device)
        self._dtype = compute_dtype(settings.dtype, self._device)
        if run is None:
            attention.resolve(
                settings.attention_backend,
                device=self._device,
                dtype=self._dtype,
                head_dim=self.config.vision.head_dim,
                family=self.config.family,
            )
        self._fetcher = Fetcher(fetch_policy(settings))
        self._store = EmbeddingStore(
            settings.store_bytes,
            width=self.config.vision.text_hidden_size,
            dtype=torch.float32 if run is not None else self._dtype,
            disk=disk_tier(settings),
            shared=shared_tier(settings),
        )
        cores = os.cpu_count() or 1
        self._decoder = Decoder(
            self.config,
            decode_limits(settings),
            picture_threads=settings.decode_threads or cores,
            film_workers=settings.film_workers or min(cores, MAX_FILM_WORKERS),
            on_film_worker_restart=lambda reason: self.metrics.film_worker_restarts.labels(reason).inc(),
        )

    @property
    def pipeline(self) -> Pipeline:
        """Only once started."""
        if self._pipeline is None:
            raise RuntimeError("the pipeline is used before the service is ready")
        return self._pipeline

    @property
    def queued_patches(self) -> int:
        return self._batcher.queued_patches if self._batcher else 0

    @property
    def running_batch_s(self) -> float:
        """Age of the batch that runs now, 0 if none does."""
        busy_since_s = self._batcher.busy_since_s if self._batcher else None
        return 0.0 if busy_since_s is None else time.monotonic() - busy_since_s

    @property
    def store_stats(self) -> StoreStats:
        return self._store.stats

    def decode_jobs(self, kind: Kind) -> Jobs:
        return self._decoder.jobs(kind)

    async def start(self) -> None:
        """Start the decoders, load the weights, test the attention kernels and warm up.

        Raises:
            EncoderError: the service cannot come up; `lifecycle` says so too.
        """
        start = time.monotonic()
        try:
            await self._store.start()
            if self._run is not None:
                await self._decoder.start()
                self._serve_with(self._run, fingerprint="0" * 64)
                return
            _, engine = await asyncio.gather(self._decoder.start(), asyncio.to_thread(self._load_and_warm_up))
        except EncoderError as error:
            self.lifecycle.failed(str(error))
            raise
        self.engine = engine
        self._serve_with(lambda batch: self._run_on(engine, batch), fingerprint=engine.fingerprint)
        self.metrics.attention_batches.labels(engine.attention.name)
        self.metrics.model_info.labels(
            model=self.model_name,
            family=self.config.family,
            fingerprint=engine.fingerprint,
            device=str(engine.device),
            dtype=dtype_name(engine.dtype),
            attention=engine.attention.name,
        ).set(1)
        logger.info(
            "ready",
            model=self.model_name,
            source=self.config.source,
            demo_weights=self.config.is_demo,
            device=str(engine.device),
            dtype=dtype_name(engine.dtype),
            attention=engine.attention.name,
            seconds=round(time.monotonic() - start, 3),
        )

    @property
    def is_stuck(self) -> bool:
        """A thread is in the device or a decoder and does not come back; only the end of the process ends it."""
        return self._batcher is not None and self._batcher.live_threads > 0

    async def abandon(self) -> None:
        """Give up what is not done: its requests are answered with `Draining` now."""
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.close, 0.0)

    async def stop(self) -> None:
        """Fail what waits, and give back threads, processes and connections."""
        await self._store.close()
        if self._batcher is not None:
            await asyncio.to_thread(self._batcher.close)
        await self._decoder.close()
        await self._fetcher.close()

    def _load_and_warm_up(self) -> Engine:
        engine = Engine.load(
            self.settings.model,
            device=self._device,
            dtype=self._dtype,
            attention_backend=self.settings.attention_backend,
            rms_norm_eps=self.settings.rms_norm_eps,
        )
        engine.warm_up()
        return engine

    def _run_on(self, engine: Engine, batch: PackedBatch) -> Tensor:
        """(M, E) on the host."""
        self.metrics.attention_batches.labels(engine.attention_for(batch.lengths)).inc()
        return engine.run_to_host(batch)

    def _serve_with(self, run: Run, *, fingerprint: str) -> None:
        self._batcher = Batcher(
            run,
            self.config,
            max_batch_patches=self.max_batch_patches,
            max_queued_patches=self.max_queued_patches,
            metrics=self.metrics,
        )
        self._pipeline = Pipeline(
            self.config,
            fetcher=self._fetcher,
            decoder=self._decoder,
            batcher=self._batcher,
            store=self._store,
            fingerprint=fingerprint,
            max_item_bytes=self.settings.max_item_bytes,
            max_float_tokens=self.settings.max_float_tokens,
            deadline_s=self.settings.deadline_ms / 1000,
            # Two batches keep the device busy; half the queue leaves room for others where it is short.
            window_patches=min(2 * self.max_batch_patches, self.max_queued_patches // 2),
            metrics=self.metrics,
        )
        self.lifecycle.ready()

    def obstacle(self) -> EncoderError | None:
        """Why the service cannot encode now, or None. Looks at the batcher's state only, so it answers at once."""
        batcher = self._batcher
        if batcher is not None and batcher.failure is not None:
            self.lifecycle.failed("the device reported an error; only a restart helps")
        elif batcher is not None and self.lifecycle.obstacle is None and batcher.live_threads < 2:
            self.lifecycle.failed("a thread of the batcher ended; only a restart helps")
        elif self._decoder.stuck_s > PICTURE_STALL_S:
            return DeviceFailed(f"a picture has been decoded for more than {PICTURE_STALL_S:g} s")
        elif batcher is not None and self.lifecycle.obstacle is None:
            busy_since, limit = batcher.busy_since_s, self._stall_s()
            if busy_since is not None and limit is not None and time.monotonic() - busy_since > limit:
                return DeviceFailed(f"a batch has been running for more than {limit:g} s")
        return self.lifecycle.obstacle

    def _stall_s(self) -> float | None:
        if self.settings.batch_stall_s is not None:
            return self.settings.batch_stall_s
        on_gpu = self.engine is not None and self.engine.device.type == "cuda"
        return GPU_STALL_S if on_gpu else None  # a CPU may honestly take minutes for a large batch
