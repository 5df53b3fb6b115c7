"""What a decoder's process gives up before it sees a client's bytes, layer by layer; none of it can be taken back.

Each layer is optional, since containers and kernels refuse some of them: what is in force is said, not assumed. All of
it is plain system calls, so that nothing has to be installed.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from app.decode import syscall_filter

IN_FORCE: Final = "in force"
NOBODY: Final = 65_534  # user and group that own nothing

_DESCRIBE_TIMEOUT_S: Final = 120.0  # imports torch, on a busy machine
_MAX_DESCRIPTORS: Final = 64

# ---- linux/prctl.h, linux/sched.h, linux/capability.h, linux/landlock.h
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_CLONE_NEWIPC: Final = 0x08000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_CAPABILITY_VERSION: Final = 0x20080522
# Numbers of system calls that the C library has no function for; the same on x86_64 and aarch64.
_LANDLOCK_CREATE_RULESET: Final = 444
_LANDLOCK_RESTRICT_SELF: Final = 446
_LANDLOCK_VERSION: Final = 1 << 0
# Rights on files that landlock knew in its first, second, third and fifth version.
_LANDLOCK_RIGHTS: Final = ((5, 16), (3, 15), (2, 14), (1, 13))

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Bounds:
    """What is left to a decoder.

    Attributes:
        memory_bytes: address space it may add to what it has.
        file_bytes: longest file it may write; its results are files in memory.
        threads: it may start threads. Processes, never.
        files: it may open files by name for reading, as far as the file system lets it.
    """

    memory_bytes: int
    file_bytes: int
    threads: bool
    files: bool


def enter(bounds: Bounds, parent: int | None = None) -> dict[str, str]:
    """Confine this process, which must have one thread.

    Args:
        parent: process whose end ends this one.
    Returns:
        Each layer's name, and `IN_FORCE` or why it is not.
    """
    layers: dict[str, str] = {}

    def try_layer(name: str, take: Callable[[], None]) -> None:
        try:
            take()
        except (OSError, ValueError, NotImplementedError) as error:
            layers[name] = f"not in force: {(error.strerror if isinstance(error, OSError) else None) or error}"
        else:
            layers[name] = IN_FORCE

    try_layer("limits", partial(_limit, bounds))  # first: it reads a file
    if os.geteuid() == 0:  # while it may; a user who is not root needs a namespace of users for it, below
        try_layer("no_network", partial(_unshare, _CLONE_NEWNET | _CLONE_NEWIPC))
        try_layer("no_user", _become_nobody)
    else:
        layers["no_user"] = "not needed: the service is not root"
    if layers.get("no_network") != IN_FORCE:
        try_layer("no_network", partial(_unshare, _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))
    try_layer("no_capabilities", _drop_capabilities)
    # Without this, its files in /proc belong to root once it has changed its user, and films are opened there.
    try_layer("no_tracing", partial(_prctl, _PR_SET_DUMPABLE, int(bounds.files)))
    if bounds.files:
        layers["no_tracing"] = "not in force: films are opened through /proc, which needs it off"
    if parent is not None:  # here: a change of user undoes it, and the filter of system calls forbids it
        die_with(parent)
    try_layer("no_new_privileges", partial(_prctl, _PR_SET_NO_NEW_PRIVS, 1))
    try_layer("no_files", _deny_files)
    try_layer("system_calls", partial(_filter_calls, bounds))
    return layers


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the service died before its decoder started")


def limit_cpu(more_s: float) -> None:
    """Let the kernel end this process once it has used so many more seconds of CPU time."""
    _set_limit(resource.RLIMIT_CPU, int(_cpu_s() + more_s) + 1)


def describe() -> dict[str, str]:
    """What is in force of each layer for pictures on this machine, by trying it in a process of its own.

    Raises:
        OSError, subprocess.SubprocessError: the process did not start or did not answer.
    """
    done = subprocess.run(  # noqa: S603 - a constant command
        [sys.executable, "-P", "-c", f"from {__name__} import _try_out; _try_out()"],
        env={"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=_DESCRIBE_TIMEOUT_S,
        check=True,
    )
    return {str(name): str(state) for name, state in json.loads(done.stdout).items()}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _unshare(flags: int) -> None:
    """New, empty namespaces: no network interface but an unconnected loopback, no named shared memory."""
    _check(_libc.unshare(flags))


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)))


def _deny_files() -> None:
    """By landlock, with a set of rules that allows nothing; what is open stays so, files in memory can be reopened."""
    version = _check(_libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))
    num_rights = next(rights for since, rights in _LANDLOCK_RIGHTS if version >= since)
    handled = struct.pack("=Q", (1 << num_rights) - 1)
    rules = _check(_libc.syscall(_LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))
    try:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _limit(bounds: Bounds) -> None:
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    _set_limit(resource.RLIMIT_FSIZE, bounds.file_bytes)
    if not bounds.threads:  # it counts threads too, and those of all processes of the same user
        _set_limit(resource.RLIMIT_NPROC, 0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _set_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + bounds.memory_bytes)


def _set_limit(kind: int, value: int) -> None:
    """Bound it for good, but for CPU time, which every job renews."""
    _, hard = resource.getrlimit(kind)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, hard if kind == resource.RLIMIT_CPU else allowed))


def _filter_calls(bounds: Bounds) -> None:
    instructions = syscall_filter.program(threads=bounds.threads, files=bounds.files)
    held = ctypes.create_string_buffer(instructions, len(instructions))
    # struct sock_fprog: a count, and where they are
    filter_program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held)))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0))


def _try_out() -> None:
    print(json.dumps(enter(Bounds(memory_bytes=1 << 30, file_bytes=1 << 20, threads=False, files=False))))  # noqa: T201
