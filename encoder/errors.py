"""The root and the library's part of the one exception tree; the service adds leaves of its own in `app/errors.py`."""


class EncoderError(Exception):
    """Root: everything this project raises on purpose."""


class InputError(EncoderError, ValueError):
    """The caller sent something that can never work; sending it again will not help."""


class InvalidSegment(InputError):
    """A grid or a pixel tensor the tower cannot take. Says where, what came and what is allowed."""


class Unavailable(EncoderError):
    """The request was fine, the service was not; the same request may work later."""


class DeviceFailed(Unavailable):
    """The device reported an error that leaves it unusable."""


class DeviceOutOfMemory(Unavailable):
    """A batch did not fit into device memory."""


class NonFiniteResult(EncoderError):
    """The tower produced a value that is not finite: a bug, a broken kernel, or weights that overflow the dtype."""


class SetupError(EncoderError, ValueError):
    """The configuration cannot run. Raised before serving starts, never over HTTP."""


class CheckpointMismatch(SetupError):
    """A configuration or weight file that is missing, unreadable, unsupported or of other shapes than it says."""


class UnknownBackend(SetupError):
    """An attention backend name that is not in the table."""


class NoUsableBackend(SetupError):
    """A known attention backend that cannot run here, or none that can."""
