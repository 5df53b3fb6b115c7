"""What a confined process can no longer do, each tried from within one; layers that a platform refuses are skipped."""

import json
import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.decode import sandbox, syscall_filter

ROOT = Path(__file__).parents[2]
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}

BEFORE = """
import ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time, types

package = types.ModuleType("app.decode")  # without the rest of it, which imports torch
package.__path__ = ["app/decode"]
sys.modules["app.decode"] = package
from app.decode import sandbox

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
status = os.open("/proc/self/status", os.O_RDONLY)
memory = os.memfd_create("memory")
os.write(memory, b"media")

def refused(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    except RuntimeError as error:
        return str(error)
    return "done"

def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def say(value):
    print(json.dumps(value), flush=True)
"""


# Root's other way into the sandbox is that of a user who never was root.
BECOME_A_USER = """
if os.geteuid() == 0:
    sandbox._become_nobody()
    sandbox._prctl(4, 1)  # else its files in /proc stay root's
"""


def confined(
    body: str, *, threads: bool = False, files: bool = False, only: str | None = None, before: str = ""
) -> list[object]:
    """What `body` says in a confined process, line by line; the first line is the layers in force.

    Args:
        only: the one layer to enter, so that what is refused is refused by that one.
        before: what it does before it is confined.
    """
    code = textwrap.dedent(BEFORE) + before
    if only is not None:
        layers = {
            "system_calls": "_filter_calls",
            "no_files": "_deny_files",
            "limits": "_limit",
            "no_user": "_become_nobody",
            "no_network": "_unshare",
            "no_capabilities": "_drop_capabilities",
        }
        for name, function in layers.items():
            if name != only:
                code += f"sandbox.{function} = lambda *_: None\n"
    bounds = f"memory_bytes=256 << 20, file_bytes=1 << 20, threads={threads}, files={files}"
    code += f"layers = sandbox.enter(sandbox.Bounds({bounds}))\nsay(layers)\n{textwrap.dedent(body)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said: list[object] = [json.loads(line) for line in done.stdout.splitlines()]
    layers_said = said[0]
    assert isinstance(layers_said, dict)
    if only is not None and layers_said[only] != sandbox.IN_FORCE:
        pytest.skip(f"{only}: {layers_said[only]}")
    return said[1:]


def test_system_calls_a_decoder_does_not_need_are_refused() -> None:
    said = confined(
        """
        say(refused(lambda: socket.socket()))
        say(refused(lambda: socket.socketpair()))
        say(refused(lambda: os.open("/dev/null", os.O_RDONLY)))
        say(refused(lambda: os.open("/tmp/made", os.O_WRONLY | os.O_CREAT)))
        say(refused(lambda: os.fork()))
        say(refused(lambda: os.execv("/bin/true", ["true"])))
        say(refused(lambda: os.kill(os.getppid(), 0)))
        say(refused(lambda: os.pidfd_open(os.getppid())))
        say(refused(lambda: os.memfd_create("more")))
        say(refused(lambda: os.mkdir("/tmp/made")))
        say(refused(lambda: os.unlink("/tmp/made")))
        say(refused(lambda: threading.Thread(target=print).start()))
        say(refused(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)))
        say(refused(lambda: call(101, 16, os.getppid(), 0, 0)))
        """,
        only="system_calls",
    )
    assert said == ["EPERM"] * 11 + ["can't start new thread", "EPERM", "EPERM"]


def test_what_a_decoder_needs_still_works() -> None:
    said = confined(
        """
        data = os.pread(memory, 100, 0)
        say([data.decode(), os.pwrite(memory, b"pixels", 0), len(bytearray(20 << 20)), time.monotonic() > 0])
        socket.send_fds(channel, [b"done"], [memory])
        message, descriptors, _, _ = socket.recv_fds(other, 10, 1)
        say([message.decode(), os.pread(descriptors[0], 6, 0).decode()])
        os.close(descriptors[0])
        sandbox.limit_cpu(10.0)
        say(10 < resource.getrlimit(resource.RLIMIT_CPU)[0] < 60)
        """
    )
    assert said == [["media", 6, 20 << 20, True], ["done", "pixels"], True]


def test_a_film_worker_has_threads_but_no_processes_and_reads_but_does_not_write() -> None:
    said = confined(
        """
        thread = threading.Thread(target=lambda: say("in a thread"))
        thread.start()
        thread.join()
        say(refused(lambda: os.fork()))
        say(refused(lambda: os.close(os.open("/dev/null", os.O_RDONLY))))
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_RDONLY | os.O_TRUNC):
            say(refused(lambda: os.open("/tmp/made", flags, 0o600)))
        say(os.read(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY), 10).decode())
        """,
        threads=True,
        files=True,
        only="system_calls",
    )
    assert said == ["in a thread", "EPERM", "done", "EPERM", "EPERM", "EPERM", "EPERM", "media"]


def test_new_calls_look_missing_so_that_libraries_fall_back() -> None:
    said = confined(
        "say([refused(lambda: call(number, 0, 0, 0)) for number in (435, 437, 439, 451, 1000)])", only="system_calls"
    )
    assert said == [["ENOSYS"] * 5]


def test_files_cannot_be_opened_but_those_in_memory_can() -> None:
    said = confined(
        """
        say(refused(lambda: os.open("/etc/passwd", os.O_RDONLY)))
        say(refused(lambda: os.listdir("/")))
        say(refused(lambda: os.open("/proc/1/environ", os.O_RDONLY)))
        say(os.read(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY), 10).decode())
        """,
        files=True,
        only="no_files",
    )
    assert said == ["EACCES", "EACCES", "EACCES", "media"]


def test_limits() -> None:
    said = confined(
        """
        kinds = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
        say([resource.getrlimit(kind) for kind in kinds])
        say(refused(lambda: os.pwrite(memory, b"x", 1 << 20)))
        try:
            bytearray(300 << 20)
        except MemoryError:
            say("no memory")
        say(refused(lambda: [os.dup(0) for _ in range(100)]))
        """,
        only="limits",
    )
    assert said == [[[0, 0], [64, 64], [0, 0]], "EFBIG", "no memory", "EMFILE"]


def test_there_is_no_network() -> None:
    said = confined(
        """
        say(socket.if_nameindex()[:1] == [(1, "lo")] and len(socket.if_nameindex()) == 1)
        say(refused(lambda: socket.create_connection(("127.0.0.1", 1), timeout=5)))
        """,
        only="no_network",
    )
    assert said == [True, "ENETUNREACH"]


def test_no_right_is_left() -> None:
    said = confined(
        """
        lines = dict(line.split(":") for line in os.pread(status, 10_000, 0).decode().splitlines())
        say([int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")])
        say([int(lines["NoNewPrivs"]), os.geteuid() == 0])
        say(lines["Groups"].split())
        """
    )
    assert said[:2] == [[0, 0, 0, 0], [1, False]]
    assert os.geteuid() != 0 or said[2] == []


def test_a_user_who_is_not_root_loses_the_network_and_gains_no_right_by_it() -> None:
    """In a user namespace of its own, a process has every capability until it drops them."""
    said = confined(
        """
        lines = dict(line.split(":") for line in os.pread(status, 10_000, 0).decode().splitlines())
        say([int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")])
        say(layers["no_network"])
        say(refused(lambda: os.mkdir("/tmp/made")))
        """,
        before=BECOME_A_USER,
    )
    assert said[0] == [0, 0, 0, 0]
    if said[1] != sandbox.IN_FORCE:
        pytest.skip(f"no_network: {said[1]}")
    assert said[2] == "EPERM"


def test_describe_says_what_is_in_force() -> None:
    layers = sandbox.describe()
    assert layers["no_new_privileges"] == layers["limits"] == sandbox.IN_FORCE
    assert set(layers) == {
        "limits",
        "no_network",
        "no_user",
        "no_capabilities",
        "no_tracing",
        "no_new_privileges",
        "no_files",
        "system_calls",
    }


def test_a_refused_layer_is_named_and_the_others_hold() -> None:
    script = """
        import json
        from app.decode import sandbox

        def refuse(*_):
            raise PermissionError(1, "Operation not permitted")

        sandbox._unshare = refuse
        sandbox.syscall_filter.platform.machine = lambda: "riscv64"
        print(json.dumps(sandbox.enter(sandbox.Bounds(1 << 30, 1 << 20, threads=False, files=False))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    layers = json.loads(done.stdout)
    assert layers["no_network"] == "not in force: Operation not permitted"
    assert layers["system_calls"] == "not in force: no list of system calls for riscv64"
    assert layers["no_new_privileges"] == layers["limits"] == sandbox.IN_FORCE


@pytest.mark.parametrize(("column", "architecture"), [(0, "x86_64"), (1, "aarch64")])
def test_numbers_are_those_of_the_kernels_headers(column: int, architecture: str) -> None:
    if not HEADERS[architecture].exists():
        pytest.skip(f"the kernel's headers for {architecture} are not installed")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    numbers = {name: int(number) for name, number in re.findall(pattern, HEADERS[architecture].read_text())}
    if architecture == "aarch64":
        numbers["newfstatat"] = numbers["fstatat"]
    for name, row in syscall_filter._NUMBERS.items():
        assert row[column] == numbers.get(name), name


def test_the_other_architecture_has_a_filter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {}
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        programs[machine] = syscall_filter.program(threads=True, files=True)
        assert len(programs[machine]) % 8 == 0
        assert len(programs[machine]) // 8 < 4096  # the kernel takes no more
    assert programs["x86_64"] != programs["aarch64"]
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(NotImplementedError, match="riscv64"):
        syscall_filter.program(threads=True, files=True)
