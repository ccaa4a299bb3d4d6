"""The checks of `gpuwatch verify`, in the order they run. To add one: a file here, and its entry.

Those of phase "static" look at what is there; those of phase "load" try it out, and run after them.
"""

from gpuwatch.verify import Check

CHECKS: tuple[Check, ...] = ()
