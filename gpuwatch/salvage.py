"""What is saved of a gpuwatch that was killed: `python -m gpuwatch.salvage`, a one-off child.

The rings it left become a recording. A recording that was not finished gets its final name if it
has rows: it can be read up to its last whole block, and goes on saying that it was cut short.
"""

import contextlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwatch.codec import RowsBlock
from gpuwatch.errors import GpuwatchError, RecordingError
from gpuwatch.recording import RecordingReader, record, run


def salvage(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of `adopted` recordings, and what was `saved` of the rings, or an `error`.

    Settings: `unfinished` (paths); optional `recording` (the recorder's settings), and `crashed`,
    the directory of the rings, which is removed in the end.
    """
    answer: dict[str, Any] = {"adopted": []}
    for path in map(Path, settings["unfinished"]):
        try:
            answer["adopted"] += filter(None, [_adopt(path)])
        except OSError as error:  # the others may be well
            answer["error"] = str(error)
    try:
        if settings.get("recording"):
            answer["saved"] = record(settings["recording"])
    except (GpuwatchError, OSError) as error:
        answer["error"] = str(error)
    finally:
        if "crashed" in settings:
            shutil.rmtree(settings["crashed"], ignore_errors=True)
    return answer


def _adopt(path: Path) -> str:
    """Give a file its final name, and return that; one without rows is removed."""
    final = path.with_suffix("")
    has_rows = False
    with (
        contextlib.suppress(RecordingError),
        contextlib.closing(RecordingReader(path)) as reader,
    ):
        has_rows = any(isinstance(block, RowsBlock) for block in reader)
    if not has_rows or final.exists():
        path.unlink(missing_ok=True)
        return ""
    path.rename(final)
    return final.name


if __name__ == "__main__":
    sys.exit(run(salvage))
