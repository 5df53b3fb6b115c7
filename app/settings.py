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
# OpenTelemetry's own variable likewise; its others (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER) are read by its library.
OTEL_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"

MiB = 1024 * 1024


class InvalidSettings(SetupError):
    """An option or variable that is misspelt, out of bounds or of the wrong type."""


class Settings(BaseSettings):
    """Options of `moonvit-serve serve`: flags `--like-this`, variables `MOONVIT_LIKE_THIS`; a flag wins."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    control_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="second port, plain HTTP, for /health*, /metrics and /v1/info alone, answered by its own thread "
        "however many callers there are; 0 takes a free one [none]",
    )
    control_host: str | None = Field(None, description="address that port listens on [that of --host]")
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="open connections, and no more than half of the descriptors the process may open; beyond, a new "
        "one is answered 429 and closed",
    )
    docs_page: bool = Field(
        False,
        description="serve /docs, a page about /openapi.json, which loads script and style from cdn.jsdelivr.net",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["console", "json"] = Field("json", description="one JSON object or one readable line per event")

    model: str = Field(
        "demo:k3-tiny", description="checkpoint directory, or demo:k3-tiny, demo:k3, demo:k25-tiny, demo:k25"
    )
    served_model_name: str | None = Field(
        None, description="name in requests and answers [the model's family, e.g. kimi-k3]"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: cuda where there is one")
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        1, description="towers that share the work, one process and one GPU each (or all on the CPU); auto: every GPU"
    )
    tower_process: bool = Field(
        False, description="run a single tower too in a process of its own, which is replaced if its device fails"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type the tower computes in; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    attention_backend: str = Field(
        "auto",
        validation_alias=AliasChoices(f"{PREFIX}ATTENTION_BACKEND", SGLANG_ATTENTION, "attention_backend"),
        description="auto or a name shown by `moonvit-serve backends`",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: matrix products in 8 bits, on a GPU of compute capability 8.9 or later; faster, and every "
        "embedding changes by several percent",
    )
    preprocess_device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="where pictures are resized and cut into patches, to the same bits; auto: the tower's GPU if its "
        "test at start is passed, else the CPU",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="small batches as CUDA graphs; auto: on a GPU, where the attention backend is auto, triton or "
        "flashinfer_fp8",
    )
    rms_norm_eps: float | None = Field(
        None, gt=0, lt=1, description="epsilon of the tower's RMSNorm [2**-23]; 2**-7 reproduces PyTorch before 2.7"
    )

    max_batch_patches: int | None = Field(
        None,
        ge=4,
        description="patches in one batch; a segment that has more runs alone [the largest legal segment, 71424 for "
        "Kimi-K3, or what fits into the GPU's free memory]",
    )
    max_queued_patches: int | None = Field(
        None, ge=4, description="patches that may wait; beyond, requests are refused with 429 [16 batches a tower]"
    )
    max_queued_bytes: int = Field(
        4096 * MiB,
        ge=1024,
        description="bytes of decoded pixels that may wait for the device, and as many for a place in its queue; "
        "beyond, 429",
    )
    batch_stall_s: float | None = Field(
        None,
        gt=0,
        description="seconds a batch may run before /health/ready answers 503, or its worker process is replaced "
        "[60 on a GPU, off on a CPU]",
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

    picture_workers: int = Field(0, ge=0, le=256, description="processes that decode pictures; 0: one per CPU core")
    picture_deadline_s: float = Field(30.0, gt=0, description="seconds one picture may take to decode")
    picture_worker_memory_bytes: int = Field(
        2048 * MiB, ge=256 * MiB, description="address space that one picture may add to its process"
    )
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
    max_fetched_bytes: int = Field(
        2048 * MiB,
        ge=1024,
        description="bytes of all media fetched by URL that are not encoded yet, together; beyond, 429",
    )
    fetch_connect_timeout_s: float = Field(5.0, gt=0, description="seconds to connect to a media host")
    fetch_idle_timeout_s: float = Field(10.0, gt=0, description="seconds without a byte from a media host")
    fetch_total_timeout_s: float = Field(30.0, gt=0, description="seconds for one remote item, redirects included")
    fetch_max_redirects: int = Field(3, ge=0, le=10, description="redirects followed for one remote item")

    api_key_file: Path | None = Field(
        None, description="file of API keys, one `NAME:KEY` a line; SIGHUP reads it again [none: anybody may call]"
    )
    metrics_without_key: bool = Field(False, description="answer /metrics without an API key")
    key_requests_per_s: float | None = Field(
        None, gt=0, le=1_000_000, description="requests per second of one API key; beyond, 429 [no limit]"
    )
    key_burst: int | None = Field(
        None, ge=1, le=1_000_000, description="requests one API key may send at once [one second's worth]"
    )
    key_max_requests: int | None = Field(
        None, ge=1, le=65536, description="requests of one API key in flight; beyond, 429 [no limit]"
    )

    ssl_certfile: Path | None = Field(
        None, description="certificate chain (PEM) to serve HTTPS with; SIGHUP reads it again [none: plain HTTP]"
    )
    ssl_keyfile: Path | None = Field(None, description="its private key (PEM) [in the same file]")
    ssl_keyfile_password_file: Path | None = Field(
        None, description="file with the private key's password [it has none]"
    )
    ssl_ca_certs: Path | None = Field(None, description="CA certificates (PEM) to check clients' against [none]")
    ssl_require_client_cert: bool = Field(False, description="refuse clients without a certificate (mutual TLS)")

    otlp_endpoint: str | None = Field(
        None,
        validation_alias=AliasChoices(f"{PREFIX}OTLP_ENDPOINT", OTEL_ENDPOINT, "otlp_endpoint"),
        description="OTLP/HTTP collector to send traces to, e.g. http://HOST:4318; extra `otel` [none]",
    )

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
    borrowed = {SGLANG_ATTENTION: "attention_backend", OTEL_ENDPOINT: "otlp_endpoint"}
    field = borrowed.get(name) or name.removeprefix(PREFIX).lower()
    return f"--{field.replace('_', '-')} (or {PREFIX}{field.upper()}): {error['msg']}"
