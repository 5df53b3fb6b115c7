"""What goes wrong during a soak. A fault is a coroutine: it does its harm, undoes it where that takes an operator, and
says in a few words what it did; or raises `Skipped`."""

import asyncio
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.async_client import Connections
from benchmarks.running import Running, free_port
from benchmarks.soak_media import KEY, large_form

STALL_S = 45.0  # a client that does not read: above the service's patience
OUTAGE_S = 12.0  # of Redis, and of the disk
TMPFS_BYTES = 48 << 20
DECODERS, TOWERS = "app.decode", "app.replicas"  # in the command lines of the service's own processes


class Skipped(Exception):
    """The fault cannot be had here."""


class Faults:
    """All faults, around one service and the stores it uses."""

    def __init__(self, running: Running, redis: "Redis | None", store: "Store") -> None:
        self._running = running
        self._redis = redis
        self._store = store
        self._rng = random.Random(0)  # noqa: S311
        self._large = large_form(running.port, 24)

    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        return {
            "a decoder is killed": self.kill_decoder,
            "a client stops reading": self.stop_reading,
            "a decoder hangs": self.hang_decoder,
            "clients leave in the middle of their bodies": self.leave,
            "Redis restarts": self.restart_redis,
            "a tower's process is killed": self.kill_tower,
            "the store's disk is full": self.fill_disk,
            "keys are read again": self.hang_up,
            "all decoders are killed": self.kill_all_decoders,
            "clients leave before their answers": self.leave_early,
        }

    async def kill_decoder(self) -> str:
        pid = self._rng.choice(self._leaves(DECODERS))
        os.kill(pid, signal.SIGKILL)
        return f"process {pid}"

    async def kill_all_decoders(self) -> str:
        pids = self._processes(DECODERS)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        return f"{len(pids)} processes, their template among them"

    async def hang_decoder(self) -> str:
        pid = self._rng.choice(self._leaves(DECODERS))
        os.kill(pid, signal.SIGSTOP)
        return f"process {pid} is stopped for good"

    async def kill_tower(self) -> str:
        pid = self._rng.choice(self._processes(TOWERS))
        os.kill(pid, signal.SIGKILL)
        return f"process {pid}"

    async def hang_up(self) -> str:
        num_keys = self._store.write_keys(self._rng.randint(1, 100))
        os.kill(self._running.process.pid, signal.SIGHUP)
        return f"SIGHUP, {num_keys} keys"

    async def stop_reading(self) -> str:
        loop, connection = asyncio.get_running_loop(), socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        with connection:
            await loop.sock_connect(connection, ("127.0.0.1", self._running.port))
            await loop.sock_sendall(connection, self._large)
            await asyncio.sleep(STALL_S)
        return f"{len(self._large) >> 10} KiB asked, nothing read for {STALL_S:g} s"

    async def leave(self) -> str:
        connections, loop = Connections(self._running.port), asyncio.get_running_loop()
        for turn in range(20):
            with await connections.connect() as connection:
                await loop.sock_sendall(connection, self._large[: len(self._large) * turn // 20])
        return "20 clients"

    async def leave_early(self) -> str:
        connections, loop = Connections(self._running.port), asyncio.get_running_loop()
        for turn in range(20):
            with await connections.connect() as connection:
                await loop.sock_sendall(connection, self._large)
                await asyncio.sleep(turn / 20)
        return "20 clients, up to a second after their request"

    async def restart_redis(self) -> str:
        if self._redis is None:
            raise Skipped("no redis-server, or no redis library")
        self._redis.stop()
        await asyncio.sleep(OUTAGE_S)
        self._redis.start()
        return f"away for {OUTAGE_S:g} s, then empty"

    async def fill_disk(self) -> str:
        if not self._store.is_small:
            raise Skipped("no file system of its own (needs root)")
        ballast = self._store.directory / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                size = ballast.stat().st_size
        await asyncio.sleep(OUTAGE_S)
        ballast.unlink()
        return f"{size >> 20} MiB of ballast for {OUTAGE_S:g} s"

    def _processes(self, part: str) -> list[int]:
        pids = [pid for pid in descendants(self._running.process.pid) if part in command_line(pid)]
        if not pids:
            raise Skipped(f"no process of {part}")
        return pids

    def _leaves(self, part: str) -> list[int]:
        """Those that have no children: workers, not what they are copied from."""
        pids = self._processes(part)
        return [pid for pid in pids if not children(pid)] or pids


class Redis:
    """A server of this run's own, which keeps nothing on disk."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.DEVNULL
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Store:
    """A directory for the service's disk tier, on a small file system of its own where this process may mount one; and
    the file of API keys."""

    def __init__(self, directory: Path, is_small: bool, key_file: Path) -> None:
        self.directory = directory
        self.is_small = is_small
        self.key_file = key_file
        self.write_keys(0)

    def write_keys(self, others: int) -> int:
        """The callers' own key and so many that nobody uses; how many there are."""
        keys = [KEY, *(secrets.token_urlsafe(24) for _ in range(others))]
        self.key_file.write_text("".join(f"caller-{number}:{key}\n" for number, key in enumerate(keys)))
        self.key_file.chmod(0o600)
        return len(keys)


@contextmanager
def stores() -> Iterator[tuple[Store, Redis | None]]:
    with ExitStack() as undo:
        directory, others = (Path(undo.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(directory)]
        is_small = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        if is_small:
            undo.callback(subprocess.run, ["umount", "-l", str(directory)], check=False)
        redis = None
        if shutil.which("redis-server") and _has_redis_library():
            redis = Redis()
            undo.callback(redis.stop)
        yield Store(directory, is_small, others / "keys"), redis


def _has_redis_library() -> bool:
    try:
        import redis  # noqa: F401
    except ImportError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it died with another
        os.kill(pid, number)
