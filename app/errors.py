"""The service's leaves of the exception tree; `app/problems.py` maps each to its HTTP status."""

from encoder.errors import InputError, Unavailable


class InvalidRequest(InputError):
    """The request's form: JSON, a field, a type, a data URI."""


class Unauthorized(InputError):
    """No API key, or one that is not known here; `reason` says which, and never the key."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelNotFound(InputError):
    """`model` names no model served here."""


class ClientTooSlow(InputError):
    """The request body did not arrive in time."""


class LimitExceeded(InputError):
    """Body, bytes, pixels, frames, items or tokens over a stated limit."""


class UnsupportedMedia(InputError):
    """Bytes that are no picture or film we read, or the other kind than the caller says."""


class CorruptMedia(InputError):
    """A picture or film of a known format that does not decode."""


class FetchDenied(InputError):
    """A scheme or address the service does not fetch from."""


class FetchFailed(InputError):
    """Remote media answered an error, timed out, or was too slow."""


class DtypeOverflow(InputError):
    """A value that the answer's dtype cannot hold."""


class Overloaded(Unavailable):
    """The queue is full; `retry_after_s` is when it should have drained at the measured rate."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Starting(Unavailable):
    """Weights, self-test or warm-up are not done."""


class Draining(Unavailable):
    """The service is shutting down and takes no new work."""


class DeadlineExceeded(Unavailable):
    """The request's deadline passed before its result was ready."""
