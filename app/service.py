"""`Service`: everything one process serves with, and how it comes up and goes down."""

import asyncio
import os
import time
from collections.abc import Sequence

import structlog
import torch

from app.batcher import Batcher
from app.decode import Decoder, Jobs, Kind
from app.device import compute_dtype, resolve_device
from app.fetch import Fetcher
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.pipeline import Pipeline
from app.policies import batch_budget, decode_limits, disk_tier, fetch_policy, fitted_budget, shared_tier
from app.problems import PROBLEMS
from app.replicas import TowerFacts, Towers, TowerStatus
from app.settings import Settings
from app.store import EmbeddingStore, StoreStats
from app.tower import InlineTower, Run, Tower
from encoder import DeviceFailed, EncoderError, attention, load_config

logger = structlog.get_logger("moonvit.service")

MODEL_NAMES = {"kimi_k3": "kimi-k3", "kimi_k25": "kimi-k2.5"}
QUEUED_BATCHES = 16  # of each tower, default bound of the queue: about the work of half a minute on a busy GPU
MAX_FILM_WORKERS = 8  # by default: each may hold gigabytes of frames
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
        self.facts: TowerFacts | None = None  # of the first tower, once all are loaded
        self._stand_ins: Sequence[Tower] = [] if run is None else [InlineTower(run)]
        self._batcher: Batcher | None = None
        self._pipeline: Pipeline | None = None
        self.max_batch_patches = batch_budget(settings, self.config)
        self._device = resolve_device(settings.device)
        self._dtype = compute_dtype(settings.dtype, self._device)
        self._towers: Towers | None = None
        if run is None:
            self._towers = self._make_towers()
            attention.resolve(
                settings.attention_backend,
                device=self._device,
                dtype=self._dtype,
                head_dim=self.config.vision.head_dim,
                family=self.config.family,
            )
        queued_batches = QUEUED_BATCHES * (len(self._towers) if self._towers else 1)
        self.max_queued_patches = settings.max_queued_patches or queued_batches * self.max_batch_patches
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
            picture_workers=settings.picture_workers or cores,
            film_workers=settings.film_workers or min(cores, MAX_FILM_WORKERS),
            on_worker_restart=lambda kind, reason: self.metrics.decode_worker_restarts.labels(kind, reason).inc(),
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
    def queued_bytes(self) -> int:
        return self._batcher.queued_bytes if self._batcher else 0

    @property
    def running_batch_s(self) -> float:
        """Age of the batch that runs now, 0 if none does."""
        busy_since_s = self._batcher.busy_since_s if self._batcher else None
        return 0.0 if busy_since_s is None else time.monotonic() - busy_since_s

    @property
    def store_stats(self) -> StoreStats:
        return self._store.stats

    @property
    def tower_statuses(self) -> list[TowerStatus]:
        """Of each tower, in order; none where a function stands in for them."""
        return self._towers.statuses if self._towers else []

    def decode_jobs(self, kind: Kind) -> Jobs:
        return self._decoder.jobs(kind)

    @property
    def sandbox(self) -> dict[Kind, dict[str, str]]:
        """What is in force of each layer around the decoders; nothing before they have started."""
        return self._decoder.sandbox

    async def start(self) -> None:
        """Start the decoders, load the weights, test the attention kernels and warm up.

        Raises:
            EncoderError: the service cannot come up; `lifecycle` says so too.
        """
        start = time.monotonic()
        try:
            await self._store.start()
            towers = self._towers
            if towers is None:
                await self._decoder.start()
                self._serve_with(self._stand_ins, fingerprint="0" * 64)
                return
            _, facts = await asyncio.gather(self._decoder.start(), asyncio.to_thread(towers.start))
        except EncoderError as error:
            self.lifecycle.failed(str(error))
            raise
        self.facts = facts
        self.max_batch_patches = fitted_budget(self.settings, self.config, facts.patches_that_fit)
        self._decoder.defers_preprocessing = facts.defers_preprocessing
        self._serve_with(towers.all, fingerprint=facts.fingerprint)
        self.metrics.attention_batches.labels(facts.attention)
        self.metrics.model_info.labels(
            model=self.model_name,
            family=self.config.family,
            fingerprint=facts.fingerprint,
            device=facts.device,
            dtype=facts.dtype,
            attention=facts.attention,
        ).set(1)
        logger.info("decoders", sandbox=self.sandbox)
        logger.info(
            "ready",
            model=self.model_name,
            source=self.config.source,
            demo_weights=self.config.is_demo,
            device=facts.device,
            towers=len(towers),
            dtype=facts.dtype,
            quantization=facts.quantization or "none",
            attention=facts.attention,
            batch_patches=self.max_batch_patches,
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
        if self._towers is not None:
            await asyncio.to_thread(self._towers.close)
        await self._decoder.close()
        await self._fetcher.close()

    def _make_towers(self) -> Towers:
        return Towers(
            self.settings,
            self._device,
            self._dtype,
            self.config.vision.text_hidden_size,
            stall_s=self._stall_s(),
            on_restart=lambda tower, reason: self.metrics.tower_restarts.labels(str(tower), reason).inc(),
            on_batch=self._count_batch,
        )

    def _count_batch(self, tower: int, backend: str) -> None:
        self.metrics.tower_batches.labels(str(tower)).inc()
        self.metrics.attention_batches.labels(backend).inc()

    def _serve_with(self, towers: Sequence[Tower], *, fingerprint: str) -> None:
        self._batcher = Batcher(
            towers,
            self.config,
            max_batch_patches=self.max_batch_patches,
            max_queued_patches=self.max_queued_patches,
            max_queued_bytes=self.settings.max_queued_bytes,
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
            max_decoded_bytes=self.settings.max_queued_bytes,
            deadline_s=self.settings.deadline_ms / 1000,
            # Two batches keep a device busy; half the queue leaves room for others where it is short.
            window_patches=min(2 * len(towers) * self.max_batch_patches, self.max_queued_patches // 2),
            metrics=self.metrics,
        )
        self.lifecycle.ready()

    def obstacle(self) -> EncoderError | None:
        """Why the service cannot encode now, or None. Looks at the batcher's state only, so it answers at once."""
        batcher = self._batcher
        if batcher is not None and batcher.failure is not None:
            self.lifecycle.failed("the device reported an error; only a restart helps")
        elif batcher is not None and self.lifecycle.obstacle is None and batcher.live_threads < batcher.num_threads:
            self.lifecycle.failed("a thread of the batcher ended; only a restart helps")
        elif batcher is not None and self.lifecycle.obstacle is None:
            return self._tower_obstacle(batcher)
        return self.lifecycle.obstacle

    def _tower_obstacle(self, batcher: Batcher) -> EncoderError | None:
        if self._towers is not None and self._towers.are_workers:  # a worker that is stuck is replaced
            return None if self._towers.any_up else DeviceFailed(f"no tower is up, of {len(self._towers)}")
        busy_since, limit = batcher.busy_since_s, self._stall_s()
        if busy_since is not None and limit is not None and time.monotonic() - busy_since > limit:
            return DeviceFailed(f"a batch has been running for more than {limit:g} s")
        return None

    def _stall_s(self) -> float | None:
        if self.settings.batch_stall_s is not None:
            return self.settings.batch_stall_s
        # A CPU may honestly take minutes for a large batch.
        return GPU_STALL_S if self._device.type == "cuda" and not self._stand_ins else None
