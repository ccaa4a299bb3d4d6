"""The place: where a node's samples and recordings lie, as the daemon tells who reads them."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuwatch.errors import RequestError
from gpuwatch.signals import Entity
from gpuwatch.takes import SUFFIX

if TYPE_CHECKING:
    from gpuwatch.feed import Feed

NAME = re.compile(  # that an address can have, too
    r"[^/.\x00-\x1f\x7f\ud800-\udfff][^/\x00-\x1f\x7f\ud800-\udfff]{0,250}"
)


class Place(NamedTuple):
    """What a reader is told with each request.

    `names` are the entities of rings as others know them. `history` and `recordings` are
    directories. `recording` is the file that is meant when a request names none; None for the
    running node. `rules` are the config's.
    """

    rings: Sequence[str] = ()
    names: Mapping[Entity, Entity] = {}
    history: str = ""
    recordings: str = ""
    recording: str | None = None
    rules: Mapping[str, Mapping[str, Any]] = {}

    def path(self, name: str) -> Path:
        """Return a recording's file; RequestError if there is none of that name."""
        if not NAME.fullmatch(name):
            raise RequestError(f"recording: {name!r} is no name of a recording")
        path = Path(self.recordings) / name
        with contextlib.suppress(OSError):  # a name that is too long, say
            ours = name == self.recording or (path.suffix == SUFFIX and not path.is_symlink())
            if ours and path.is_file():
                return path
        raise RequestError(f"recording: {name}: there is none of that name", 404)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "names": [[old, new] for old, new in self.names.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Place":
        """Rebuild it; KeyError, TypeError or ValueError if `data` is none."""
        names = {Entity.from_json(old): Entity.from_json(new) for old, new in data["names"]}
        return cls(**{**data, "names": names})


def names_of(feed: "Feed") -> dict[Entity, Entity]:
    """Return what the entities of all rings are called here, also of those that are no more."""
    names = {old: info.entity for old, info in feed.ended.items()}
    return names | {old: new for m in feed.manifests.values() for old, new in m.names.items()}
