"""Connections beyond the limit: told to come back, and closed, before a byte of theirs is parsed."""

import structlog

from app.errors import Overloaded
from app.problems import describe, problem_headers
from app.schemas import PROBLEM

logger = structlog.get_logger("moonvit.request")

MAX_LEAVING = 512  # connections that are read to their end at a time, so that their answer arrives; others are cut
LOG_EVERY_S = 10.0


class Crowd:
    """Those that one server turned away: how many still leave, and how many are not in the log yet."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.num_leaving = 0
        self._num_unsaid = 0
        self._said_s = -LOG_EVERY_S

    def turn_away(self, now_s: float, request_id: str) -> bytes | None:
        """A whole answer to whatever will be asked; None if even that is too much. Ends with `left`."""
        self.num_leaving += 1
        self._num_unsaid += 1
        if now_s - self._said_s >= LOG_EVERY_S:
            logger.warning("connections turned away", count=self._num_unsaid, limit=self.max_connections)
            self._num_unsaid, self._said_s = 0, now_s
        return None if self.num_leaving > MAX_LEAVING else self._refusal(request_id)

    def left(self) -> None:
        self.num_leaving -= 1

    def _refusal(self, request_id: str) -> bytes:
        error = Overloaded(f"{self.max_connections} connections are open, limit {self.max_connections}")
        problem = describe(error, request_id)
        body = problem.model_dump_json(exclude_none=True).encode()
        lines = [f"HTTP/1.1 {problem.status} Too Many Requests", f"content-type: {PROBLEM}"]
        lines += [f"{name.lower()}: {value}" for name, value in problem_headers(error).items()]
        lines += [f"content-length: {len(body)}", f"x-request-id: {request_id}", "connection: close", "", ""]
        return "\r\n".join(lines).encode() + body
