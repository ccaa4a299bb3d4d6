"""Make a recording fit to be shipped: without the identity of the host it was taken on.

    python benchmarks/bundle.py RECORDING gpuwatch/data/h200.gwr

UUIDs and serials are replaced; the host's name, config and boot id, alerts and readings of canaries
are left out; the rows stay.
"""

import sys
from dataclasses import replace
from pathlib import Path

from gpuwatch.recording import (
    AlertsBlock,
    EventsBlock,
    RecordingReader,
    RecordingWriter,
    RowsBlock,
)


def main(source: Path, target: Path) -> None:
    reader = RecordingReader(source)
    entities = []
    for number, info in enumerate(reader.head.entities):
        labels = dict(info.labels)
        if "uuid" in labels:
            labels["uuid"] = f"GPU-00000000-0000-4000-8000-{number:012x}"
        labels.pop("serial", None)
        entities.append(replace(info, labels=labels))
    head = replace(reader.head, entities=tuple(entities), config={}, host={}, boot_id="")
    with RecordingWriter(target, head) as writer:
        for block in reader:
            if isinstance(block, EventsBlock):
                writer.events(block.events)
            elif isinstance(block, AlertsBlock):
                writer.alerts([])
            elif isinstance(block, RowsBlock):
                writer.rows(block)
    target.chmod(0o644)
    print(f"{target}: {writer.bytes} bytes, complete: {reader.complete}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
