"""What is said of a service that is on its way down, and of a control port that never came up."""

import socket

import pytest
from starlette.types import Receive, Scope, Send

from app.control import ControlServer
from app.errors import Draining
from app.lifecycle import Lifecycle
from app.main import serve
from app.settings import InvalidSettings, Settings
from encoder import DeviceFailed


def test_a_failure_is_said_unless_it_is_shutting_down() -> None:
    lifecycle = Lifecycle(4, 1 << 20)
    lifecycle.ready()
    lifecycle.failed("the device is gone")
    assert isinstance(lifecycle.obstacle, DeviceFailed)
    lifecycle.drain()
    lifecycle.failed("a thread of the batcher ended")
    assert isinstance(lifecycle.obstacle, Draining)


def test_a_control_port_that_never_started_can_be_stopped() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None: ...

    with socket.socket() as listener:
        ControlServer(application, listener).stop()


def test_two_ports_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(InvalidSettings, match=f"--control-port {port}: --port has it already"):
        serve(Settings(port=port, control_port=port, device="cpu"))
