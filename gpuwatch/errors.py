"""What may reach a user: one line that names the file, key or entity and the fix."""

PASS = 0
WARN = 1
FAIL = 2
UNKNOWN = 3
USAGE = 64
INTERNAL = 70


class GpuwatchError(Exception):
    """A fault the user can act on; `exit_code` is what the command ends with."""

    exit_code = INTERNAL


class ConfigError(GpuwatchError):
    """A config key, flag, port or directory cannot be used as given."""

    exit_code = USAGE


class RecordingError(GpuwatchError):
    """A recording cannot be read: foreign, damaged or missing."""

    exit_code = USAGE


class StateError(GpuwatchError):
    """What a daemon has kept cannot be read: missing, damaged or not ours to read."""

    exit_code = USAGE


class RequestError(GpuwatchError):
    """What was asked for cannot be answered; `status` is that of HTTP."""

    exit_code = USAGE

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ControlError(GpuwatchError):
    """The running daemon refused a request or cannot be reached."""

    exit_code = UNKNOWN


class NoAnswer(ControlError):
    """A daemon runs and has not answered in time."""


class SourceUnavailable(GpuwatchError):
    """The source cannot work on this machine now; it is opened again later.

    Not a failure of gpuwatch: no driver, library and driver of different versions, no device.
    """

    exit_code = UNKNOWN


class SourceUnsupported(SourceUnavailable):
    """The machine has nothing for the source to read; that is no fault, and may change."""
