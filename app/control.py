"""Health checks, metrics and /v1/info on a port of their own, answered by a thread of their own (`--control-port`).

The service's event loop serves everybody in turn: with more callers than it has time for, a new connection waits for
seconds before anybody reads its first byte. Here only probes and scrapes wait for each other. The thread shares the
interpreter with that loop, so it is slower while the loop is busy, but by milliseconds. What its routes read are
numbers, and tables that are replaced whole; they change nothing.
"""

import socket
import threading

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from app.protocol import Protocol

logger = structlog.get_logger("moonvit.control")

PATHS = ("/health", "/health/live", "/health/ready", "/metrics", "/v1/info")
MAX_CONNECTIONS = 256
STOP_S = 3.0


class ControlRoutes:
    """The application with all other paths taken away; what is no such path is answered by its own 404."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] not in PATHS or scope["method"] not in ("GET", "HEAD")):
            path = f"{scope['path']} on this port"
            scope = {**scope, "method": "GET", "path": path, "raw_path": path.encode("utf-8", "replace")}
        await self._app(scope, receive, send)


class ControlServer:
    """Serves `PATHS` of an application that is running, over plain HTTP: it is meant for an address that only probes
    and Prometheus reach. Keys are asked for as on the other port."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            ControlRoutes(app),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.http_protocol_class = Protocol.bounded(MAX_CONNECTIONS)
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.ident is not None:  # it was started
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            self._server.run([self._listener])
        except Exception:
            logger.exception("the control port is closed")
