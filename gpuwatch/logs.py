"""Logging: one line a record on standard error, as logfmt or JSON.

Under systemd the journal keeps time and process, so the line starts with its syslog priority
instead (sd-daemon(3)). A record's `extra` becomes fields of the line.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["logfmt", "json"]
LEVELS: tuple[str, ...] = get_args(Level)
FORMATS: tuple[str, ...] = get_args(Format)

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def configure(settings: Mapping[str, Any], **fields: str) -> None:
    """Send this process's log to standard error.

    `settings` is the config's `[log]`; `fields` are put on every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(settings["format"], to_journal(), fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings["level"].upper())


def to_journal() -> bool:
    """Whether standard error is the journal: JOURNAL_STREAM names its device and inode.

    The variable alone is no proof: it is inherited by processes whose output goes elsewhere.
    """
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class LineFormatter(logging.Formatter):
    """Writes a record as one line; line breaks inside values are escaped."""

    def __init__(self, style: str, journal: bool, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._encode = _json if style == "json" else _logfmt
        self._journal = journal
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line feed."""
        line: dict[str, Any] = {}
        if not self._journal:
            second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            line["time"] = f"{second}.{int(record.msecs):03d}Z"
        line |= {"level": record.levelname.lower(), "message": record.getMessage()}
        line |= self._fields
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = self._encode(line)
        return f"<{_priority(record.levelno)}>{text}" if self._journal else text


def _priority(level: int) -> int:
    """Return the syslog priority, syslog(3)."""
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps(line, default=str)


def _logfmt(line: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_value(str(value))}" for key, value in line.items())


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
