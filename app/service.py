"""`Service`: everything one process serves with, and how it comes up and goes down."""

import asyncio
import os
import time
from importlib.metadata import version
from typing import Any

import structlog
import torch

from app.batcher import Batcher, Run
from app.decode import DecodeLimits, Decoder
from app.device import compute_dtype, dtype_name, resolve_device
from app.fetch import Fetcher, FetchPolicy
from app.intake import MAX_JSON_MARKS
from app.keys import preprocessing_id
from app.lifecycle import Lifecycle
from app.pipeline import Pipeline
from app.settings import InvalidSettings, Settings
from app.store import DiskTier, EmbeddingStore, Tier
from encoder import DeviceFailed, EncoderConfig, EncoderError, Engine, attention, largest_segment, load_config

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
        self.lifecycle = Lifecycle(settings.max_requests)
        self.engine: Engine | None = None
        self._run = run
        self._batcher: Batcher | None = None
        self._pipeline: Pipeline | None = None
        self.max_batch_patches = _batch_budget(settings, self.config)
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
            disk=None if settings.store_dir is None else DiskTier(settings.store_dir, settings.store_dir_bytes),
            shared=shared_tier(settings),
        )
        cores = os.cpu_count() or 1
        self._limits = decode_limits(settings)
        self._decoder = Decoder(
            self.config,
            self._limits,
            picture_threads=settings.decode_threads or cores,
            film_workers=settings.film_workers or min(cores, MAX_FILM_WORKERS),
        )

    @property
    def pipeline(self) -> Pipeline:
        """Only once started."""
        if self._pipeline is None:
            raise RuntimeError("the pipeline is used before the service is ready")
        return self._pipeline

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
        self._serve_with(engine.run_to_host, fingerprint=engine.fingerprint)
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

    def _serve_with(self, run: Run, *, fingerprint: str) -> None:
        self._batcher = Batcher(
            run,
            self.config,
            max_batch_patches=self.max_batch_patches,
            max_queued_patches=self.max_queued_patches,
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

    def info(self) -> dict[str, Any]:
        """The document of `GET /v1/info`."""
        settings, engine, vision = self.settings, self.engine, self.config.vision
        obstacle = self.obstacle()
        return {
            "version": version("moonvit-serve"),
            "status": "ready" if obstacle is None else str(obstacle),
            "model": {
                "name": self.model_name,
                "source": self.config.source,
                "demo_weights": self.config.is_demo,
                "family": self.config.family,
                "architecture": {
                    "hidden_size": vision.hidden_size,
                    "qkv_hidden_size": vision.qkv_hidden_size,
                    "num_heads": vision.num_heads,
                    "head_dim": vision.head_dim,
                    "num_layers": vision.num_layers,
                    "norm_type": vision.norm_type,
                    "norm_eps": vision.norm_eps,
                    "projector": vision.mm_projector_type,
                    "embedding_width": vision.text_hidden_size,
                },
                "weights_sha256": engine.weights_sha256 if engine else None,
                "fingerprint": engine.fingerprint if engine else None,
            },
            "preprocessing": preprocessing_id(self.config),
            "device": device_name(engine.device) if engine else None,
            "dtype": dtype_name(engine.dtype) if engine else None,
            "attention": {
                "configured": settings.attention_backend,
                "selected": engine.attention.name if engine else None,
                "refused": engine.attention.refused if engine else {},
                "self_test": engine.attention.self_test if engine else {},
                "graph_buckets": engine.graphs.buckets if engine and engine.graphs else [],
            },
            "limits": {
                "items": settings.max_items,
                "body_bytes": settings.max_body_bytes,
                "json_bytes": settings.max_json_bytes,
                "json_marks": MAX_JSON_MARKS,
                "item_bytes": settings.max_item_bytes,
                "image_pixels": settings.max_image_pixels,
                "video_frames": settings.max_video_frames,
                "video_frames_walked": settings.max_video_frames_walked,
                "video_duration_s": self._limits.max_film_duration_s,
                "item_patches": self._limits.max_patches,
                "float_tokens": settings.max_float_tokens,
                "requests": settings.max_requests,
                "deadline_ms": settings.deadline_ms,
            },
            "store": {
                "max_bytes": self._store.stats.max_bytes,
                "bytes": self._store.stats.bytes,
                "entries": self._store.stats.entries,
                "hits": self._store.stats.hits,
                "misses": self._store.stats.misses,
                "evictions": self._store.stats.evictions,
                "disk": settings.store_dir is not None,
                "shared": settings.store_url is not None,
            },
            "batching": {
                "max_batch_patches": self.max_batch_patches,
                "max_queued_patches": self.max_queued_patches,
                "queued_patches": self._batcher.queued_patches if self._batcher else 0,
                "device_busy": self._batcher is not None and self._batcher.busy_since_s is not None,
            },
        }


def shared_tier(settings: Settings) -> Tier | None:
    """The tier behind `--store-url`, where one is set.

    Raises:
        InvalidSettings: a URL that is none, or the library for it is not installed.
    """
    if settings.store_url is None:
        return None
    try:
        from app.store.shared import SharedTier
    except ImportError as error:
        raise InvalidSettings("--store-url needs the extra `store`: pip install 'moonvit-serve[store]'") from error
    return SharedTier(settings.store_url, ttl_s=settings.store_ttl_s)


def _batch_budget(settings: Settings, config: EncoderConfig) -> int:
    """Patches of one batch; every legal segment must fit, or packing could stall."""
    needed = largest_segment(config.media)
    asked = settings.max_batch_patches or needed
    if asked < needed:
        raise InvalidSettings(f"--max-batch-patches {asked}: the largest legal segment has {needed} patches")
    return asked


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def fetch_policy(settings: Settings) -> FetchPolicy:
    return FetchPolicy(
        max_bytes=settings.max_item_bytes,
        allowed_domains=frozenset(settings.allowed_media_domains) or None,
        allow_private=settings.allow_private_media,
        connect_timeout_s=settings.fetch_connect_timeout_s,
        idle_timeout_s=settings.fetch_idle_timeout_s,
        total_timeout_s=settings.fetch_total_timeout_s,
        max_redirects=settings.fetch_max_redirects,
    )


def decode_limits(settings: Settings) -> DecodeLimits:
    return DecodeLimits(
        max_pixels=settings.max_image_pixels,
        max_sampled_frames=settings.max_video_frames,
        max_walked_frames=settings.max_video_frames_walked,
        film_deadline_s=settings.film_deadline_s,
        film_worker_memory_bytes=settings.film_worker_memory_bytes,
    )
