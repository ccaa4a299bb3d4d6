"""`python -m gpuwatch` is the `gpuwatch` command."""

import sys

from gpuwatch.cli import main

sys.exit(main())
