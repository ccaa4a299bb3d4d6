"""The reference pages say what the code has."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "reference.py"


def test_the_reference_is_up_to_date():
    """Every metric, key and flag is in its page as it is in the code."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)
