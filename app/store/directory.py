"""A directory of entries, one file each: read, written, bounded and cleaned. Blocking; runs in the disk tier's threads.

The directory itself is the index, so several processes may share one and a restart has nothing to rebuild.
"""

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from app.store import codec
from app.store.codec import DamagedError
from app.store.entry import KEY, StoredEmbedding

SUFFIX = ".safetensors"
_FILE = re.compile(KEY.pattern + re.escape(SUFFIX))
_TEMPORARY = re.compile(r"\." + KEY.pattern + r"\.[0-9a-f]{16}\.tmp")

# What opening says of links, sockets and files of others.
_FOREIGN = {errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM}

# A listing removes a little more than it must, so that the next writes need none.
ROOM_AFTER_EVICTION = 0.05
# Other processes write as well; their files are seen at the next listing, at the latest after this time.
LISTING_S = 30.0


class _File(NamedTuple):
    used_ns: int  # mtime
    num_bytes: int
    path: Path


class Directory:
    """Files of at most `max_bytes` together, least recently used first out. Reads may run beside anything.

    Files are not synced: after a power cut some may be torn, which their digest tells.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._changing = threading.Lock()  # one write, removal or listing at a time
        self._listed_s = -math.inf
        self.bytes = 0  # as of the last listing, and what was written since
        self.evictions = 0

    def open(self) -> None:
        """Create the directory, sweep what a killed process left, and bring the rest within the bound."""
        with self._changing:
            self._make_room(0)

    def read(self, key: str) -> StoredEmbedding | None:
        """The entry, which becomes the most recently used; None if there is none.

        Raises:
            DamagedError: there is something else in its place.
        """
        path = self._file(key)
        try:
            # Not through a link, and not waiting for a pipe's other end.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _FOREIGN and os.path.lexists(path):
                raise DamagedError("not a file of ours") from error
            raise
        try:
            return self._read(fd, key)
        finally:
            os.close(fd)

    def write(self, entry: StoredEmbedding) -> bool:
        """Write the entry unless it is there already; False if it is larger than the bound.

        Raises:
            OSError: disk full, no permission, and the like; nothing is left behind.
        """
        head, body = codec.dump(entry)
        size = len(head) + body.nbytes
        if size > self._max_bytes or len(head) > codec.MAX_HEADER_BYTES:
            return False
        with self._changing:
            path = self._file(entry.key)
            if path.is_dir():  # nothing of ours, and nothing a file could replace
                return False
            if path.is_file() and not path.is_symlink():
                return True
            if self.bytes + size > self._max_bytes or self._clock() - self._listed_s > LISTING_S:
                self._make_room(size)
            try:
                self._write(path, head, body)
            except (BlockingIOError, FileNotFoundError):
                # Another process saw the new file before it was locked, and swept it; that does not happen twice.
                self._write(path, head, body)
            self.bytes += size
        return True

    def remove(self, key: str) -> None:
        """Remove the key's file, or what stands in its place. A directory, which we never make, stays."""
        with self._changing, contextlib.suppress(FileNotFoundError, IsADirectoryError):
            path = self._file(key)
            size = path.lstat().st_size
            path.unlink()
            self.bytes = max(0, self.bytes - size)

    def _file(self, key: str) -> Path:
        return self._path / (key + SUFFIX)

    def _read(self, fd: int, key: str) -> StoredEmbedding:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError("not a file")
        if facts.st_size > self._max_bytes:
            raise DamagedError("larger than the whole tier")
        with open(fd, "rb", closefd=False) as file:
            entry = codec.load(file, facts.st_size, key)
        with contextlib.suppress(OSError):  # somebody else's file
            os.utime(fd)
        return entry

    def _write(self, path: Path, head: bytes, body: memoryview) -> None:
        temporary = self._path / f".{path.stem}.{secrets.token_hex(8)}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Held until the file has its name: who lists the directory can tell it from a dead process's.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in (memoryview(head), body):
                done = 0
                while done < part.nbytes:
                    done += os.write(fd, part[done:])
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """List the directory, and remove the least recently used files until so many bytes fit."""
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = sorted(self._list())
        total = sum(file.num_bytes for file in files)
        if total + num_bytes > self._max_bytes:
            allowed = max(0, self._max_bytes - num_bytes - int(self._max_bytes * ROOM_AFTER_EVICTION))
            for file in files:
                if total <= allowed:
                    break
                file.path.unlink(missing_ok=True)
                total -= file.num_bytes
                self.evictions += 1
        self.bytes = total
        self._listed_s = self._clock()

    def _list(self) -> list[_File]:
        found = []
        with os.scandir(self._path) as items:
            for item in items:
                if _FILE.fullmatch(item.name):
                    with contextlib.suppress(FileNotFoundError):  # removed by another process
                        facts = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(facts.st_mode):
                            found.append(_File(facts.st_mtime_ns, facts.st_size, Path(item.path)))
                elif _TEMPORARY.fullmatch(item.name):
                    _sweep(Path(item.path))
        return found


def _sweep(temporary: Path) -> None:
    """Remove a temporary file whose writer is gone."""
    with contextlib.suppress(OSError):  # still being written, or renamed by now
        fd = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
        finally:
            os.close(fd)
