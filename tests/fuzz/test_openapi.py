"""Requests made up from our own OpenAPI document: every answer is one the document has, and none is a 500."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.main import create_app
from app.protocol import Protocol
from app.settings import Settings
from tests.http.conftest import fake_run, png

SECONDS = float(os.environ.get("FUZZ_OPENAPI_S", "15"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real server in a thread of this process."""
    app = create_app(Settings(film_workers=1, picture_workers=2, deadline_ms=5000), fake_run)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=Protocol, log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


def test_every_answer_is_documented(url: str) -> None:
    """Half of the time for made-up requests that keep to the document, half for such that do not."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", wait_for_schema=10)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/encode", "/v1/info", "/health/ready", "/metrics"}
    num_requests: Counter[str] = Counter()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        for operation in operations:
            share = 0.6 if operation.path == "/v1/encode" else 0.4 / (len(operations) - 1)
            end_s = time.monotonic() + SECONDS * share / 2
            with suppress(Unsatisfiable):  # nothing can be wrong with a route that takes nothing
                send(operation, mode, end_s, num_requests)
    assert num_requests["/v1/encode"] > 20
    assert all(num_requests[operation.path] for operation in operations)


def send(operation: Any, mode: GenerationMode, end_s: float, num_requests: Counter[str]) -> None:
    # In small lots: there is no way to tell Hypothesis that the time is over.
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def lot(case: Any) -> None:
        num_requests[operation.path] += 1
        response = case.call(timeout=20)
        assert response.status_code != 500, response.text
        case.validate_response(response, checks=CHECKS)

    lot()
    while time.monotonic() < end_s:
        lot()


def test_the_service_is_as_before(url: str) -> None:
    answer = requests.post(f"{url}/v1/encode", data=png(7), headers={"content-type": "image/png"}, timeout=20)
    assert answer.status_code == 200
    assert requests.get(f"{url}/health/ready", timeout=20).status_code == 200
    assert "moonvit_requests_in_flight 0.0" in requests.get(f"{url}/metrics", timeout=20).text
