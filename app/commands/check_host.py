"""`doctor`: the machine around the service: decoders, limits, memory, disk, network, certificates, clock."""

import ctypes
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from app.commands.findings import Finding, gib, installed
from app.settings import Settings
from encoder import SetupError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PICTURE_FORMATS = ("jpg", "zlib", "webp", "avif")  # Pillow's names of what it was built with; zlib is PNG
FETCH_CONNECTIONS = 128
OTHER_FILES = 128
CONNECT_TIMEOUT_S = 2.0
LEAST_SHM_BYTES = 64 * 1024**2
_TIME_ERROR = 5  # linux/timex.h: the clock is not synchronised


def check_decoders(settings: Settings) -> Iterator[Finding]:
    features = import_module("PIL.features")
    lacking = [name for name in PICTURE_FORMATS if not features.check(name)]
    text = f"Pillow {installed('pillow')} with {', '.join(name for name in PICTURE_FORMATS if name not in lacking)}"
    if lacking:
        advice = "a Pillow from PyPI's wheels has them all"
        yield Finding("pictures", "problem", f"{text}, without {', '.join(lacking)}", advice)
    else:
        yield Finding("pictures", "ok", text)
    if found := installed("simplejpeg"):
        yield Finding("pictures", "ok", f"simplejpeg {found}")
    av = import_module("av")
    ffmpeg = ".".join(map(str, av.library_versions["libavcodec"]))
    yield Finding("films", "ok", f"PyAV {installed('av')}, libavcodec {ffmpeg}")
    if installed("decord"):
        advice = "pip uninstall decord decord2; pip install decord2"
        yield Finding("films", "problem", "the distribution decord lies over decord2's files", advice)
    elif found := installed("decord2"):
        yield Finding("films", "ok", f"decord2 {found}")
    else:
        yield Finding("films", "problem", "decord2 is not installed", "pip install decord2")


def check_sandbox(settings: Settings) -> Iterator[Finding]:
    if find_spec("app.decode.sandbox") is None:
        yield Finding("sandbox", "warning", "decoders are not confined in this build", "see docs/security.md")
        return
    layers: dict[str, str] = import_module("app.decode.sandbox").describe()
    for name, state in layers.items():
        lacking = state.startswith("not in force")
        # Films need that one off; for pictures, of which this speaks, it is tried like the others.
        yield Finding(
            "sandbox",
            "warning" if lacking else "ok",
            f"{name}: {state}",
            "the container or the kernel refuses it, see docs/security.md" if lacking else "",
        )


def check_files(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A socket per request, one more per fetched item, pipes and memory files of the decoders.
    needed = settings.max_requests + FETCH_CONNECTIONS + OTHER_FILES
    text = f"{soft} open files allowed, about {needed} needed for --max-requests {settings.max_requests}"
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard == resource.RLIM_INFINITY or hard >= needed:
            yield Finding("open files", "ok", f"{text}; the service raises its own limit, {hard} at most")
        else:
            yield Finding("open files", "problem", text, "raise the hard limit (LimitNOFILE=, --ulimit nofile=)")
    else:
        yield Finding("open files", "ok", text)


def check_memory_files(settings: Settings) -> Iterator[Finding]:
    """Media and pixels cross between processes in anonymous files in memory; PyTorch may use /dev/shm."""
    try:
        os.close(os.memfd_create("doctor", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as error:
        yield Finding("memory files", "problem", f"memfd_create fails: {error}", "allow it in the container's seccomp")
    else:
        yield Finding("memory files", "ok", "memfd_create works")
    try:
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at, not written
    except OSError:
        yield Finding("memory files", "warning", "no /dev/shm", "mount a tmpfs there; NCCL and PyTorch expect it")
        return
    small = free < LEAST_SHM_BYTES
    yield Finding(
        "memory files",
        "warning" if small else "ok",
        f"shared memory (/dev/shm) has {gib(free)} free",
        "--shm-size of the container" if small else "",
    )


def check_memory(settings: Settings) -> Iterator[Finding]:
    available = available_bytes()
    if available is None:
        yield Finding("memory", "warning", "cannot be read here")
        return
    asked = settings.store_bytes + settings.max_inflight_bytes
    text = f"{gib(available)} available, {gib(asked)} for --store-bytes and --max-inflight-bytes together"
    if asked > available:
        yield Finding("memory", "problem", text, "lower them, or give it more memory")
        return
    workers = settings.film_workers or min(os.cpu_count() or 1, 8)
    films = workers * settings.film_worker_memory_bytes
    text += f", at most {gib(films)} more for {workers} film workers"
    if asked + films > available:
        yield Finding("memory", "warning", text, "large films at once could be killed: lower --film-workers")
    else:
        yield Finding("memory", "ok", text)


def available_bytes() -> int | None:
    """What the machine has free, or what its control group leaves, if that is less."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = ((group / name).read_text().strip() for name in (limit, used))
        except OSError:
            continue
        if most.isdecimal():
            found.append(max(0, int(most) - int(now)))
    return min(found, default=None)


def check_store(settings: Settings) -> Iterator[Finding]:
    directory = settings.store_dir
    if directory is not None:
        yield _directory(directory, settings.store_dir_bytes)
    if settings.store_url is not None:
        yield _server(settings.store_url)


def _directory(directory: Path, limit_bytes: int) -> Finding:
    try:
        nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding("store", "problem", f"{directory} is not writable: {error.strerror}", "chown it, or --store-dir")
    held = 0 if nearest != directory else sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    text = f"{directory} is writable, {gib(free)} free, {gib(held)} of {gib(limit_bytes)} used"
    if free + held < limit_bytes:
        return Finding("store", "warning", text, "--store-dir-bytes is more than the disk has")
    return Finding("store", "ok", text)


def _server(url: str) -> Finding:
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 6379}"  # without the password
    if find_spec("redis") is None:
        return Finding("store", "problem", "redis is not installed", "pip install 'moonvit-serve[store]'")
    redis = import_module("redis")
    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=CONNECT_TIMEOUT_S
        ) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        return Finding(
            "store", "problem", f"{where} does not answer: {type(error).__name__}", "--store-url, its network"
        )
    return Finding("store", "ok", f"{where} answers")


def check_port(settings: Settings) -> Iterator[Finding]:
    where = f"{settings.host} port {settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        yield Finding("port", "problem", f"{where}: {error.strerror}", "is the service running? else --port, --host")
    else:
        yield Finding("port", "ok", f"{where} is free")
    if settings.host in LOOPBACK:
        return
    if settings.api_key_file is None:
        yield Finding("access", "warning", f"anybody who reaches {settings.host} may call", "--api-key-file")
    if settings.ssl_certfile is None:
        text = "keys and media travel unencrypted unless something in front ends TLS"
        yield Finding("access", "warning", text, "--ssl-certfile")


def check_tracing(settings: Settings) -> Iterator[Finding]:
    if not settings.otlp_endpoint:
        return
    from app.tracing import open_tracing

    parts = urlsplit(settings.otlp_endpoint)
    where = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    try:
        tracing = open_tracing(settings.otlp_endpoint)
        if tracing is not None:
            tracing.close()
        host, _, port = where.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except SetupError as error:
        yield Finding("tracing", "problem", str(error))
    except OSError as error:
        text = f"{where} does not answer: {error.strerror or type(error).__name__}"
        yield Finding("tracing", "warning", text, "spans are dropped until it does")
    else:
        yield Finding("tracing", "ok", f"{where} answers")


def check_platform(settings: Settings) -> Iterator[Finding]:
    text = f"Python {platform.python_version()}, moonvit-serve {installed('moonvit-serve')}, {os.cpu_count()} cores"
    yield Finding("python", "ok", f"{text}, {platform.system()} {platform.machine()}")


def check_clock(settings: Settings) -> Iterator[Finding]:
    """Certificates and leases are checked against it."""
    if platform.system() != "Linux":
        return
    # struct timex, all zero: asks, and sets nothing. Larger than it is on any architecture.
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        yield Finding("clock", "warning", "the kernel's clock is not synchronised", "run chrony or systemd-timesyncd")
    elif state < 0:
        yield Finding("clock", "ok", "whether it is synchronised cannot be asked here")
    else:
        yield Finding("clock", "ok", "synchronised")
