"""Where everything is built and joined: settings -> service -> application -> server."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app import openapi
from app.batcher import Run
from app.boundary import RequestBoundary, error_response, problem_response
from app.logs import configure_logging
from app.problems import METHOD_NOT_ALLOWED, NOT_FOUND, document
from app.routes import router
from app.service import Service
from app.settings import Settings
from encoder import EncoderError

logger = structlog.get_logger("moonvit.main")

EXIT_SETUP = 2


def create_app(settings: Settings, run: Run | None = None) -> FastAPI:
    """Build the application. Weights are read in its lifespan, while /health already answers.

    Args:
        run: in place of the tower, in tests: (L, 3, P, P) patches -> (M, E).
    Raises:
        SetupError: a configuration that cannot work.
    """
    service = Service(settings, run)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        app.state.starting = starting
        if run is not None:
            await starting
        try:
            yield
        finally:
            await asyncio.gather(starting, return_exceptions=True)
            await service.stop()

    app = FastAPI(
        title="moonvit-serve",
        summary="Images and videos in, MoonViT3d embeddings out.",
        version=version("moonvit-serve"),
        lifespan=lifespan,
        exception_handlers={EncoderError: _on_error, HTTPException: _on_http_error},
    )
    app.state.service = service
    app.include_router(router)
    app.add_middleware(RequestBoundary, lifecycle=service.lifecycle)
    openapi.install(app)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.state.id)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Routing errors of the framework, in the same form as ours."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = dict(getattr(error, "headers", None) or {})
    if status == METHOD_NOT_ALLOWED.status:
        detail = f"{request.method} {request.url.path[:200]}; allowed: {headers.get('Allow', 'another method')}"
        return problem_response(document(METHOD_NOT_ALLOWED, detail, request.state.id), headers)
    return problem_response(document(NOT_FOUND, f"no route {request.url.path[:200]}", request.state.id), headers)


class Server(uvicorn.Server):
    """uvicorn, which on SIGTERM finishes what was accepted before it closes its sockets, and which ends when the
    service cannot come up."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        self._draining: asyncio.Task[None] | None = None
        self.startup_error: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._app.state.starting.add_done_callback(self._on_service_started)

    def _on_service_started(self, starting: "asyncio.Task[None]") -> None:
        if not starting.cancelled() and starting.exception() is not None:
            self.startup_error = starting.exception()
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's own, it does not raise the signal again at the end: a service that stops as told exits 0."""
        if sig == signal.SIGTERM and self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:  # Ctrl-C, or a second signal: now
            self.force_exit = self.should_exit
            self.should_exit = True

    async def _drain(self) -> None:
        service: Service = self._app.state.service
        logger.info("draining", in_flight=service.lifecycle.in_flight)
        service.lifecycle.drain()
        if not await service.lifecycle.idle(service.settings.drain_timeout_s):
            logger.warning("drain timed out", in_flight=service.lifecycle.in_flight)
        self.should_exit = True


def serve(settings: Settings) -> int:
    """Run the service until it is told to stop; the process's exit code.

    Raises:
        SetupError: a configuration that cannot work: names before the port is opened, weights after.
    """
    configure_logging(settings.log_level, settings.log_format)
    app = create_app(settings)
    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,  # the boundary writes one line a request
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        ),
        app,
    )
    server.run()
    if server.startup_error is not None:
        raise server.startup_error
    return 0 if server.started else EXIT_SETUP
