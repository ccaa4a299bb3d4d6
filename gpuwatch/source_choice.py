"""What `--source` may say: the node, a made-up one, or a recording."""

from pathlib import Path

from gpuwatch.errors import RecordingError
from gpuwatch.paths import BUNDLED_RECORDING
from gpuwatch.scenario import SCENARIOS

KINDS = "nvml, simulated, simulated:SCENARIO, replay:FILE or replay:bundled"


def parse_source(text: str) -> dict[str, str]:
    """Return {"kind", "scenario", "file"}; ValueError if there is no such source."""
    kind, colon, rest = text.partition(":")
    if text in ("nvml", "simulated"):
        return {"kind": kind, "scenario": "healthy", "file": ""}
    if kind == "simulated" and colon:
        if rest not in SCENARIOS:
            raise ValueError(f"unknown scenario {rest!r}: {', '.join(SCENARIOS)}")
        return {"kind": kind, "scenario": rest, "file": ""}
    if kind == "replay" and rest:
        if not rest.isprintable():
            raise ValueError(f"{rest!r} is no path")
        file = BUNDLED_RECORDING if rest == "bundled" else Path(rest).absolute()
        try:
            if not file.is_file():
                raise ValueError(f"{file}: no such recording")
            _try_recording(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except RecordingError as error:
            raise ValueError(str(error)) from error
        return {"kind": kind, "scenario": "", "file": str(file)}
    raise ValueError(f"unknown source {text!r}: {KINDS}")


def _try_recording(file: Path) -> None:
    """Read the first tick; raises RecordingError if there is none, OSError."""
    from gpuwatch.playback import Playback
    from gpuwatch.recording import RecordingReader

    reader = RecordingReader(file)
    try:
        next(Playback(reader).steps(0, loop=False))
    finally:
        reader.close()
