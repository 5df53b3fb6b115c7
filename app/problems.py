"""The one table from exceptions to HTTP problems (RFC 9457), and the one place that turns them into responses."""

import math
from dataclasses import dataclass

from app import errors as app_errors
from app.schemas import Problem
from encoder import errors as encoder_errors
from encoder.errors import EncoderError


@dataclass(frozen=True)
class ProblemType:
    """What every problem of one kind shares."""

    status: int
    code: str
    title: str
    retry_after_s: int | None = None

    @property
    def type(self) -> str:
        """Reference to the page that explains it, served by this service."""
        return f"/problems/{self.code.replace('_', '-')}"


PROBLEMS: dict[type[EncoderError], ProblemType] = {
    app_errors.InvalidRequest: ProblemType(400, "invalid_request", "The request is not well-formed"),
    app_errors.Unauthorized: ProblemType(401, "unauthorized", "An API key is needed"),
    app_errors.ModelNotFound: ProblemType(404, "model_not_found", "No such model is served here"),
    app_errors.ClientTooSlow: ProblemType(408, "client_too_slow", "The request body did not arrive in time"),
    app_errors.LimitExceeded: ProblemType(413, "limit_exceeded", "A stated limit is exceeded"),
    app_errors.UnsupportedMedia: ProblemType(415, "unsupported_media", "The media is of a kind that is not read"),
    app_errors.CorruptMedia: ProblemType(422, "corrupt_media", "The media does not decode"),
    encoder_errors.InvalidSegment: ProblemType(422, "invalid_segment", "The media has sizes that cannot be encoded"),
    app_errors.FetchDenied: ProblemType(422, "fetch_denied", "The address or scheme may not be fetched"),
    app_errors.DtypeOverflow: ProblemType(422, "dtype_overflow", "A value does not fit the requested dtype"),
    app_errors.FetchFailed: ProblemType(424, "fetch_failed", "The remote media could not be fetched"),
    app_errors.Overloaded: ProblemType(429, "overloaded", "The service is full", retry_after_s=1),
    encoder_errors.NonFiniteResult: ProblemType(500, "internal", "Internal error"),
    app_errors.Starting: ProblemType(503, "starting", "The service is starting", retry_after_s=5),
    app_errors.Draining: ProblemType(503, "draining", "The service is shutting down", retry_after_s=5),
    encoder_errors.DeviceFailed: ProblemType(503, "device_failed", "The device failed", retry_after_s=30),
    encoder_errors.DeviceOutOfMemory: ProblemType(
        503, "device_out_of_memory", "The device has no memory for this item", retry_after_s=5
    ),
    app_errors.DeadlineExceeded: ProblemType(504, "deadline_exceeded", "The deadline passed"),
}

NOT_FOUND = ProblemType(404, "not_found", "No such route")
METHOD_NOT_ALLOWED = ProblemType(405, "method_not_allowed", "The route does not take this method")
INTERNAL = ProblemType(500, "internal", "Internal error")

ALL_PROBLEMS = {problem.code: problem for problem in (*PROBLEMS.values(), NOT_FOUND, METHOD_NOT_ALLOWED)}

MAX_DETAIL_CHARS = 500
MOST_RETRY_AFTER_S = 86_400.0  # a rate may be set so low that the time is no number


def problem_type(error: BaseException) -> ProblemType:
    """The table's entry for an exception; anything that is not ours is a bug and becomes `internal`."""
    for cls in type(error).__mro__:
        if cls in PROBLEMS:
            return PROBLEMS[cls]
    return INTERNAL


def describe(error: BaseException, instance: str, index: int | None = None) -> Problem:
    """The problem document of an exception. Text of exceptions that are not ours never leaves the service."""
    kind = problem_type(error)
    if kind.code == "internal":
        detail = f"An internal error; the log has the details under {instance}."
    else:
        detail = str(error) or kind.title
    return document(kind, detail, instance, index)


def document(kind: ProblemType, detail: str, instance: str, index: int | None = None) -> Problem:
    where = "" if index is None else f"input[{index}]: "
    text = where + detail
    if len(text) > MAX_DETAIL_CHARS:
        text = text[: MAX_DETAIL_CHARS - 1] + "…"
    return Problem(
        type=kind.type,
        title=kind.title,
        status=kind.status,
        detail=text,
        instance=instance,
        code=kind.code,
        index=index,
    )


def retry_after(error: BaseException) -> dict[str, str]:
    """`Retry-After` header of an exception: its own measured seconds, else the table's, else none. Rounded up: who
    comes back at the stated time is not to be early."""
    seconds = getattr(error, "retry_after_s", None) or problem_type(error).retry_after_s
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(min(seconds, MOST_RETRY_AFTER_S))))}


def problem_headers(error: BaseException) -> dict[str, str]:
    """All headers that belong to the problem of an exception."""
    if isinstance(error, app_errors.Unauthorized):
        given = error.reason != "missing"
        return {"WWW-Authenticate": 'Bearer error="invalid_token"' if given else "Bearer"}  # RFC 6750, section 3
    return retry_after(error)
