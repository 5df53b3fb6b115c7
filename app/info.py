"""What a running service says of itself: the document of `GET /v1/info`."""

from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

from app.intake import MAX_JSON_MARKS
from app.keys import preprocessing_id
from app.policies import decode_limits
from app.service import Service

_version = cache(version)  # which reads and parses files, every time


def describe_service(service: Service) -> dict[str, Any]:
    """The document of `GET /v1/info`."""
    settings, facts, vision = service.settings, service.facts, service.config.vision
    obstacle, store, limits = service.obstacle(), service.store_stats, decode_limits(settings)
    return {
        "version": _version("moonvit-serve"),
        "status": "ready" if obstacle is None else str(obstacle),
        "model": {
            "name": service.model_name,
            "source": service.config.source,
            "demo_weights": service.config.is_demo,
            "family": service.config.family,
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
            "weights_sha256": facts.weights_sha256 if facts else None,
            "fingerprint": facts.fingerprint if facts else None,
        },
        "preprocessing": preprocessing_id(service.config),
        "device": facts.device_name if facts else None,
        "dtype": facts.dtype if facts else None,
        "quantization": facts.quantization if facts else None,
        "attention": {
            "configured": settings.attention_backend,
            "selected": facts.attention if facts else None,
            "refused": facts.refused if facts else {},
            "rules": [{"batches": batches, "backend": backend} for batches, backend in facts.rules] if facts else [],
            "self_test": facts.self_test if facts else {},
            "graph_buckets": facts.graph_buckets if facts else [],
        },
        "sandbox": service.sandbox,
        "towers": [asdict(status) for status in service.tower_statuses],
        "limits": {
            "items": settings.max_items,
            "body_bytes": settings.max_body_bytes,
            "json_bytes": settings.max_json_bytes,
            "json_marks": MAX_JSON_MARKS,
            "item_bytes": settings.max_item_bytes,
            "image_pixels": settings.max_image_pixels,
            "video_frames": settings.max_video_frames,
            "video_frames_walked": settings.max_video_frames_walked,
            "video_duration_s": limits.max_film_duration_s,
            "item_patches": limits.max_patches,
            "float_tokens": settings.max_float_tokens,
            "requests": settings.max_requests,
            "inflight_bytes": settings.max_inflight_bytes,
            "fetched_bytes": settings.max_fetched_bytes,
            "deadline_ms": settings.deadline_ms,
        },
        "store": {
            "max_bytes": store.max_bytes,
            "bytes": store.bytes,
            "entries": store.entries,
            "hits": store.hits,
            "misses": store.misses,
            "evictions": store.evictions,
            "disk": settings.store_dir is not None,
            "shared": settings.store_url is not None,
        },
        "batching": {
            "max_batch_patches": service.max_batch_patches,
            "max_queued_patches": service.max_queued_patches,
            "queued_patches": service.queued_patches,
            "max_queued_bytes": service.settings.max_queued_bytes,
            "queued_bytes": service.queued_bytes,
            "device_busy": service.running_batch_s > 0,
        },
    }
