"""Write the dashboards: `python grafana/build.py`; with --check, only say whether they are current.

Exits with 1 when --check finds a file that is not what the code makes.
"""

import argparse
import json
import sys
from pathlib import Path

from boards import BOARDS

DASHBOARDS = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Return the text of each dashboard by its file's name."""
    models = [build() for build in BOARDS]
    return {
        f"{model['uid']}.json": json.dumps(model, indent=2, ensure_ascii=False) + "\n"
        for model in models
    }


def main() -> int:
    """Write or check all files; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    check = parser.parse_args().check
    made = texts()
    old = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    if check:
        stale = sorted(name for name in made.keys() | old.keys() if made.get(name) != old.get(name))
        if stale:
            sys.stderr.write(f"not current: {', '.join(stale)}: run python grafana/build.py\n")
        return 1 if stale else 0
    DASHBOARDS.mkdir(exist_ok=True)
    for name in old.keys() - made.keys():
        (DASHBOARDS / name).unlink()
    for name, text in made.items():
        (DASHBOARDS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
