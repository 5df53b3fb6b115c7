"""Settings -> what each component of the service takes: its limits, policies and tiers."""

from app.decode import DecodeLimits
from app.fetch import FetchPolicy
from app.settings import InvalidSettings, Settings
from app.store import DiskTier, Tier
from encoder import EncoderConfig, largest_segment

LEAST_BATCH_PATCHES = 4096  # about one picture of 900x900; a batch takes a launch of every kernel, however small it is


def disk_tier(settings: Settings) -> Tier | None:
    """The tier in `--store-dir`, where one is set."""
    return None if settings.store_dir is None else DiskTier(settings.store_dir, settings.store_dir_bytes)


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


def batch_budget(settings: Settings, config: EncoderConfig) -> int:
    """Patches of one batch of several segments; a segment that has more runs alone."""
    largest = largest_segment(config.media)
    asked = settings.max_batch_patches or largest
    least = min(LEAST_BATCH_PATCHES, largest)
    if asked < least:
        raise InvalidSettings(f"--max-batch-patches {asked}: allowed from {least} on, less is mostly overhead")
    return asked


def fitted_budget(settings: Settings, config: EncoderConfig, patches_that_fit: int | None) -> int:
    """`batch_budget`, unless it was not asked for and fewer patches fit into the device's memory."""
    budget = batch_budget(settings, config)
    if settings.max_batch_patches is not None or patches_that_fit is None or patches_that_fit >= budget:
        return budget
    return max(patches_that_fit, min(LEAST_BATCH_PATCHES, budget))


def fetch_policy(settings: Settings) -> FetchPolicy:
    return FetchPolicy(
        max_bytes=settings.max_item_bytes,
        max_held_bytes=settings.max_fetched_bytes,
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
        picture_deadline_s=settings.picture_deadline_s,
        picture_worker_memory_bytes=settings.picture_worker_memory_bytes,
        film_deadline_s=settings.film_deadline_s,
        film_worker_memory_bytes=settings.film_worker_memory_bytes,
    )
