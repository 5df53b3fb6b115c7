"""Every option of the service: name, unit, default, bound. Built once in `main`; nothing else reads the environment."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from encoder import SetupError

PREFIX = "MOONVIT_"
# SGLang's variable is honoured when ours is unset, so that a deployment can switch without editing its environment.
SGLANG_ATTENTION = "SGLANG_MM_ATTENTION_BACKEND"

MiB = 1024 * 1024


class InvalidSettings(SetupError):
    """An option or variable that is misspelt, out of bounds or of the wrong type."""


class Settings(BaseSettings):
    """Options of `moonvit-serve serve`: flags `--like-this`, variables `MOONVIT_LIKE_THIS`; a flag wins."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["console", "json"] = Field("json", description="one JSON object or one readable line per event")

    model: str = Field(
        "demo:k3-tiny", description="checkpoint directory, or demo:k3-tiny, demo:k3, demo:k25-tiny, demo:k25"
    )
    served_model_name: str | None = Field(
        None, description="name in requests and answers [the model's family, e.g. kimi-k3]"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: cuda where there is one")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type the tower computes in; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    attention_backend: str = Field(
        "auto",
        validation_alias=AliasChoices(f"{PREFIX}ATTENTION_BACKEND", SGLANG_ATTENTION, "attention_backend"),
        description="auto or a name shown by `moonvit-serve backends`",
    )
    rms_norm_eps: float | None = Field(
        None, gt=0, lt=1, description="epsilon of the tower's RMSNorm [2**-23]; 2**-7 reproduces PyTorch before 2.7"
    )

    max_batch_patches: int | None = Field(
        None, ge=4, description="patches in one batch [the largest legal segment, 71424 for Kimi-K3]"
    )
    max_queued_patches: int | None = Field(
        None, ge=4, description="patches that may wait; beyond, requests are refused with 429 [16 batches]"
    )
    batch_stall_s: float | None = Field(
        None, gt=0, description="seconds a batch may run before /health/ready answers 503 [60 on a GPU, off on a CPU]"
    )
    max_requests: int = Field(512, ge=1, le=65536, description="requests in flight; beyond, 429")

    max_items: int = Field(64, ge=1, le=4096, description="items in one request")
    max_body_bytes: int = Field(256 * MiB, ge=1024, description="bytes of a request body")
    max_inflight_bytes: int = Field(
        2048 * MiB, ge=1024, description="bytes of all request bodies in flight together; beyond, 429"
    )
    max_json_bytes: int = Field(
        64 * MiB, ge=1024, description="bytes of a JSON body; larger media travel as a form or a raw body"
    )
    max_item_bytes: int = Field(128 * MiB, ge=1024, description="bytes of one picture or film")
    max_image_pixels: int = Field(64_000_000, ge=1, description="pixels of one picture or frame")
    max_video_frames: int = Field(2048, ge=1, description="frames sampled from one film")
    max_video_frames_walked: int = Field(36_000, ge=1, description="frames in one film's container")
    max_float_tokens: int = Field(4096, ge=1, description="tokens in an answer of encoding_format float")
    body_timeout_s: float = Field(30.0, gt=0, description="seconds within which a request body must arrive")
    deadline_ms: int = Field(
        60_000, ge=1, description="milliseconds after its body was read that a request may take; caps its deadline_ms"
    )

    decode_threads: int = Field(0, ge=0, le=256, description="threads that decode pictures; 0: one per CPU core")
    film_workers: int = Field(0, ge=0, le=64, description="processes that decode films; 0: one per CPU core, at most 8")
    film_deadline_s: float = Field(60.0, gt=0, description="seconds one film may take to decode")
    film_worker_memory_bytes: int = Field(4096 * MiB, ge=256 * MiB, description="address space of one film process")

    store_bytes: int = Field(
        2048 * MiB, ge=0, description="memory for embeddings of items that come again; 0 keeps none"
    )
    store_dir: Path | None = Field(None, description="directory to keep embeddings in, over a restart too [none]")
    store_dir_bytes: int = Field(64 * 1024 * MiB, ge=MiB, description="bytes in that directory")
    store_url: str | None = Field(
        None,
        description="Redis or Valkey server to share embeddings through, redis://HOST:PORT/DB; extra `store` [none]",
    )
    store_ttl_s: int = Field(3600, ge=1, description="seconds an embedding stays on that server")

    allowed_media_domains: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="hosts media may be fetched from, comma-separated [any public host]"
    )
    allow_private_media: bool = Field(False, description="fetch from private and loopback addresses too")
    fetch_connect_timeout_s: float = Field(5.0, gt=0, description="seconds to connect to a media host")
    fetch_idle_timeout_s: float = Field(10.0, gt=0, description="seconds without a byte from a media host")
    fetch_total_timeout_s: float = Field(30.0, gt=0, description="seconds for one remote item, redirects included")
    fetch_max_redirects: int = Field(3, ge=0, le=10, description="redirects followed for one remote item")

    drain_timeout_s: float = Field(30.0, ge=0, description="seconds accepted work may take after SIGTERM")

    @field_validator("allowed_media_domains", mode="before")
    @classmethod
    def _split_domains(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from flags (they win) and `MOONVIT_*` variables.

    Raises:
        InvalidSettings: names every option that is out of bounds, and variables no option claims.
    """
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    unknown = [name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known]
    if unknown:
        raise InvalidSettings("; ".join(_unknown_variable(name, known) for name in sorted(unknown)))
    try:
        return Settings(**(flags or {}))
    except ValidationError as error:
        raise InvalidSettings("; ".join(_describe(e) for e in error.errors())) from error


def _unknown_variable(name: str, known: set[str]) -> str:
    # Without the prefix: shared by all, it would make any two of them look alike.
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1)
    return f"variable {name} names no option" + (f"; did you mean {PREFIX}{near[0]}?" if near else "")


def _describe(error: Any) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    field = name.removeprefix(PREFIX).lower() if name != SGLANG_ATTENTION else "attention_backend"
    return f"--{field.replace('_', '-')} (or {PREFIX}{field.upper()}): {error['msg']}"
