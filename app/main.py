"""Where everything is built and joined: settings -> service -> application -> server."""

import asyncio
import contextvars
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import version
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app import openapi
from app.auth import Keys, open_keys
from app.boundary import RequestBoundary, error_response, problem_response
from app.control import ControlServer
from app.gauges import install_gauges
from app.key_file import load_keys
from app.logs import configure_logging
from app.loop_lag import watch_event_loop
from app.memory import keep_memory_flat
from app.problems import METHOD_NOT_ALLOWED, NOT_FOUND, document
from app.protocol import Protocol
from app.routes import router
from app.service import Service
from app.settings import InvalidSettings, Settings
from app.tls import TlsFiles, load_certificate, make_context
from app.tower import Run
from app.tracing import open_tracing
from encoder import EncoderError, SetupError

logger = structlog.get_logger("moonvit.main")

EXIT_SETUP = 2
EXIT_FORCED = 130

REFUSAL_S = 2.0  # for the answers of requests that were given up, before connections are cut


def create_app(settings: Settings, run: Run | None = None) -> FastAPI:
    """Build the application. Weights are read in its lifespan, while /health already answers.

    Args:
        run: in place of the tower, in tests: (L, 3, P, P) patches -> (M, E).
    Raises:
        SetupError: a configuration that cannot work.
    """
    service = Service(settings, run)
    keys = open_keys(settings, service.metrics)
    tracing = open_tracing(settings.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        lag = asyncio.create_task(watch_event_loop(service.metrics.event_loop_lag_seconds))
        starting = asyncio.create_task(service.start())
        app.state.starting = starting
        if run is not None:
            await starting
        try:
            yield
        finally:
            await asyncio.gather(starting, return_exceptions=True)
            await service.stop()
            lag.cancel()
            await asyncio.gather(lag, return_exceptions=True)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="moonvit-serve",
        summary="Images and videos in, MoonViT3d embeddings out.",
        version=version("moonvit-serve"),
        lifespan=lifespan,
        exception_handlers={EncoderError: _on_error, HTTPException: _on_http_error},
        redirect_slashes=False,  # it would answer with an address made of the client's own Host header
        docs_url="/docs" if settings.docs_page else None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.keys = keys
    app.include_router(router)
    app.add_middleware(
        RequestBoundary, lifecycle=service.lifecycle, metrics=service.metrics, keys=keys, tracing=tracing
    )
    install_gauges(service.metrics, service)
    openapi.install(app, keys)
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
    """uvicorn, which on SIGTERM finishes what was accepted before it closes its sockets, on SIGHUP reads keys and
    certificate again, and which ends when the service cannot come up."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        tls: TlsFiles | None = None,
        control: ControlServer | None = None,
    ) -> None:
        super().__init__(config)
        self._control = control
        self._app = app
        self._tls = tls
        self._service: Service = app.state.service
        self._keys: Keys | None = app.state.keys
        self._stopping: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()
        self.startup_error: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if self._control is not None:
                self._control.start()
            self._app.state.starting.add_done_callback(self._on_service_started)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        reload = asyncio.create_task(self._reload())
        self._reloads.add(reload)
        reload.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        """Read the key file and the certificate again. One that is broken changes nothing, and the log says why."""
        if self._keys is None and self._tls is None:
            logger.info("SIGHUP: no key file and no certificate to read again")
        async with self._reloading:  # the last signal's files win
            if self._keys is not None:
                try:
                    self._keys.replace(await asyncio.to_thread(load_keys, self._keys.path))
                    logger.info("keys read again", keys=len(self._keys))
                except SetupError as error:
                    logger.error("keys not read again, the old ones hold", reason=str(error))
            if self._tls is not None and self.config.ssl is not None:
                try:
                    await asyncio.to_thread(load_certificate, self.config.ssl, self._tls)
                    logger.info("certificate read again")
                except SetupError as error:
                    logger.error("certificate not read again, the old one is served", reason=str(error))

    def _on_service_started(self, starting: "asyncio.Task[None]") -> None:
        if not starting.cancelled() and starting.exception() is not None:
            self.startup_error = starting.exception()
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM drains, Ctrl-C refuses what is not done, a second signal ends the process. Unlike with uvicorn's own
        the signal is not raised again at the end: a service that stops as told exits 0."""
        if self._stopping is not None:
            os._exit(EXIT_FORCED)
        patience_s = self._service.settings.drain_timeout_s if sig == signal.SIGTERM else 0.0
        # In a context of its own: the signal may come amid a request, whose id is not the drain's.
        self._stopping = asyncio.get_running_loop().create_task(self._stop(patience_s), context=contextvars.Context())

    async def _stop(self, patience_s: float) -> None:
        lifecycle = self._service.lifecycle
        logger.info("draining", in_flight=lifecycle.in_flight)
        lifecycle.drain()
        if not await lifecycle.idle(patience_s):
            logger.warning("not all requests were done in time", in_flight=lifecycle.in_flight)
            await self._service.abandon()
            await lifecycle.idle(REFUSAL_S)
        self.should_exit = True


def serve(settings: Settings) -> int:
    """Run the service until it is told to stop; the process's exit code.

    Raises:
        SetupError: a configuration that cannot work: names before the port is opened, weights after.
    """
    configure_logging(settings.log_level, settings.log_format)
    keep_memory_flat()
    tls = TlsFiles.of(settings)
    context = None if tls is None else make_context(tls)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        access_log=False,  # the boundary writes one line a request
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
    )
    config.load()
    config.http_protocol_class = Protocol.bounded(num_connections(settings.max_connections))
    config.ssl = context  # in place of uvicorn's own, which takes half of a bad pair and asks for passwords
    with ExitStack() as stack:
        listener = stack.enter_context(listen(settings.host, settings.port))
        control = None
        logger.info("listening", address=listener.getsockname()[:2], tls=context is not None)
        if settings.control_port is not None:
            if settings.control_port == listener.getsockname()[1]:
                raise InvalidSettings(f"--control-port {settings.control_port}: --port has it already")
            host = settings.control_host or settings.host
            control_listener = stack.enter_context(listen(host, settings.control_port))
            logger.info("listening for probes", address=control_listener.getsockname()[:2], tls=False)
            control = ControlServer(app, control_listener)
            stack.callback(control.stop)  # after the last request: probes see `draining` to the end
        server = Server(config, app, tls, control)
        server.run([listener])
    if server.startup_error is not None:
        raise server.startup_error
    if server.started and app.state.service.is_stuck:
        # The device or a decoder cannot be interrupted, and Python would wait for its thread.
        os._exit(0)
    return 0 if server.started else EXIT_SETUP


def num_connections(wanted: int) -> int:
    """How many connections may be open: as many as wanted, and no more than half of the descriptors there can be.

    Takes what the system allows the process; the usual soft limit of 1024 is for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted if hard == resource.RLIM_INFINITY else min(hard, 2 * wanted)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    if soft == resource.RLIM_INFINITY or soft // 2 >= wanted:
        return wanted
    logger.warning("fewer connections than wanted", limit=soft // 2, wanted=wanted, descriptors=soft)
    return soft // 2


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded, so that a port in use is found at once.

    Raises:
        InvalidSettings: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidSettings(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener
