"""The system calls that a decoder may make, as a seccomp filter: a list of what it needs, and no to all the rest.

Nothing listed opens a socket, starts a program or process, writes to a named file or reaches another process. The
filter is put together by hand, since it is short, and libseccomp would be one more library on every machine.
"""

import os
import platform
import struct
from itertools import chain
from typing import Final, NamedTuple

# ---- struct seccomp_data: what a filter sees of a call
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST_ARGUMENT: Final = 16  # of six, 8 bytes each; the low half comes first on both architectures

# ---- instructions of classic BPF, linux/bpf_common.h
_LOAD: Final = 0x20
_JUMP_IF_EQUAL: Final = 0x15
_JUMP_IF_GREATER: Final = 0x25
_JUMP_IF_ANY_BIT: Final = 0x45
_ANSWER: Final = 0x06

# ---- answers, linux/seccomp.h
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_REFUSE: Final = 0x00050000  # with an errno in its low half
_EPERM: Final = 1
_ENOSYS: Final = 38

# C libraries try these first and fall back to an older call if it is missing, but not if it is forbidden.
_MISSING: Final = ("clone3", "openat2", "faccessat2")
_LAST_KNOWN: Final = 450  # newer calls than Linux 5.16's are missing, too

_CLONE_THREAD: Final = 0x00010000
_PROT_EXEC: Final = 4
_MORE_THAN_READING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PR_SET_NAME: Final = 15
_F_GETFD, _F_SETFD, _F_GETFL = 1, 2, 3  # setting more would let it send signals


class Rule(NamedTuple):
    """A condition on one argument: its low 32 bits have none of `no_bits`, all of `bits`, or are one of `values`."""

    argument: int
    no_bits: int = 0
    bits: int = 0
    values: tuple[int, ...] = ()


# name -> number on (x86_64, aarch64); None where the architecture has no such call
_NUMBERS: Final[dict[str, tuple[int | None, int | None]]] = {
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat2": (439, 439),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "poll": (7, None),
    "ppoll": (271, 73),
    "prctl": (157, 167),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readv": (19, 65),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "time": (201, None),
    "times": (100, 153),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

_FREE: Final = frozenset(_NUMBERS) - {
    *_MISSING, "clone", "fcntl", "mmap", "mprotect", "open", "openat", "prctl", "prlimit64", "stat", "newfstatat",
    "statx", "tgkill",
}  # fmt: skip


def program(*, threads: bool, files: bool) -> bytes:
    """The filter for the calling process, as an array of `struct sock_filter`.

    Args:
        threads: it may start threads, though never a process.
        files: it may open files for reading, where the file system lets it.
    Raises:
        NotImplementedError: no numbers for this machine's architecture.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise NotImplementedError(f"no list of system calls for {platform.machine()}")
    column, architecture = _ARCHITECTURES[platform.machine()]
    rules = _rules(threads=threads, files=files)
    allowed = {number: rules.get(name) for name in {*_FREE, *rules} if (number := _NUMBERS[name][column]) is not None}
    missing = [number for name in _MISSING if (number := _NUMBERS[name][column]) is not None]
    refuse, absent = _answer(_REFUSE | _EPERM), _answer(_REFUSE | _ENOSYS)
    return b"".join(
        chain(
            [_load(_ARCHITECTURE), _jump(_JUMP_IF_EQUAL, architecture, 1, 0), _answer(_KILL), _load(_NUMBER)],
            [_jump(_JUMP_IF_GREATER, _LAST_KNOWN, 0, 1), absent],  # x32 calls too: they have a high bit
            *([_jump(_JUMP_IF_EQUAL, number, 0, 1), absent] for number in missing),
            *(_one_call(number, rule) for number, rule in sorted(allowed.items())),
            [refuse],
        )
    )


def _rules(*, threads: bool, files: bool) -> dict[str, Rule]:
    """Calls that are allowed with some arguments only."""
    rules = {
        "fcntl": Rule(1, values=(_F_GETFD, _F_SETFD, _F_GETFL)),
        "mmap": Rule(2, no_bits=_PROT_EXEC),
        "mprotect": Rule(2, no_bits=_PROT_EXEC),
        "prctl": Rule(0, values=(_PR_SET_NAME,)),
        "prlimit64": Rule(0, values=(0,)),  # of itself
        "tgkill": Rule(0, values=(os.getpid(),)),  # how a process aborts
    }
    if threads:
        rules["clone"] = Rule(0, bits=_CLONE_THREAD)
    if files:
        rules["open"] = Rule(1, no_bits=_MORE_THAN_READING)
        rules["openat"] = Rule(2, no_bits=_MORE_THAN_READING)
        rules |= {name: Rule(0) for name in ("stat", "newfstatat", "statx")}
    else:  # of an open file only: its name is the empty string, which a filter cannot see, so any name
        rules |= {name: Rule(0) for name in ("newfstatat", "statx")}
    return rules


def _one_call(number: int, rule: Rule | None) -> list[bytes]:
    """Allow it if the rule holds, refuse it if not; other calls go on behind this."""
    allow, refuse = _answer(_ALLOW), _answer(_REFUSE | _EPERM)
    if rule is None or not (rule.no_bits or rule.bits or rule.values):
        return [_jump(_JUMP_IF_EQUAL, number, 0, 1), allow]
    body = [_load(_FIRST_ARGUMENT + 8 * rule.argument)]
    if rule.no_bits:
        body += [_jump(_JUMP_IF_ANY_BIT, rule.no_bits, 0, 1), refuse, allow]
    elif rule.bits:
        body += [_jump(_JUMP_IF_ANY_BIT, rule.bits, 1, 0), refuse, allow]
    else:
        for value in rule.values:
            body += [_jump(_JUMP_IF_EQUAL, value, 0, 1), allow]
        body += [refuse]
    return [_jump(_JUMP_IF_EQUAL, number, 0, len(body)), *body]


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _jump(condition: int, value: int, if_true: int, if_false: int) -> bytes:
    """Skip so many instructions."""
    return struct.pack("=HBBI", condition, if_true, if_false, value)


def _answer(value: int) -> bytes:
    return struct.pack("=HBBI", _ANSWER, 0, 0, value)
