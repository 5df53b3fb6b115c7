"""`key`: the name of an embedding, computable by anybody who holds the bytes. docs/api.md has the test vectors."""

import hashlib
import json
from dataclasses import asdict

from app.decode import Kind, MediaOptions
from encoder import PREPROCESSING_VERSION, EncoderConfig


def preprocessing_id(config: EncoderConfig) -> str:
    """Version of the preprocessing code and digest of its settings, e.g. `1-0123456789abcdef`."""
    settings = json.dumps(asdict(config.media), sort_keys=True, separators=(",", ":"))
    return f"{PREPROCESSING_VERSION}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"


def embedding_key(media_sha256: str, kind: Kind, options: MediaOptions, *, fingerprint: str, preprocessing: str) -> str:
    """`emb-` and the SHA-256 of the lines below, each ended by a newline.

    Args:
        media_sha256: 64 lower-case hex digits, over the item's bytes as received.
        fingerprint: of the model (`/v1/info`).
        preprocessing: of the preprocessing (`/v1/info`).
    """
    lines = ["moonvit-embedding/1", f"media={media_sha256}", f"kind={kind}"]
    if kind == "image":
        lines.append(f"apply_exif_orientation={_text(options.apply_exif_orientation)}")
    else:
        lines += [
            f"fps={_text(options.fps)}",
            f"max_frames={_text(options.max_frames)}",
            f"allow_partial={_text(options.allow_partial)}",
        ]
    lines += [f"model={fingerprint}", f"preprocessing={preprocessing}", ""]
    return "emb-" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _text(value: bool | float | None) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)  # floats: the shortest text that reads back as the same double, always with a point
