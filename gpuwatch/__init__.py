"""gpuwatch: what a GPU node is doing, millisecond by millisecond.

A signal is declared once; a source reads it; a ring holds the samples; a window sums them up;
rules judge windows; everything else shows windows and alerts.

Reading order: signals, source, ring, sampler, window, summation, alerts, daemon; then supervisor.
"""

__version__ = "0.1.0"
