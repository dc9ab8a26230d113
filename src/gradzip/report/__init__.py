"""One HTML file that shows what compression did to training runs.

record      run.jsonl: the Recorder that writes it, and what is read from it
gradients   zeros, exponents, levels and ratios of a model's gradients
svg         charts as text                 page        the report

recorder = gradzip.report.Recorder("run.jsonl", "gcomp", handle)
recorder(loss=loss.item())          # after every step
$ gradzip report run.jsonl
"""

from __future__ import annotations

from .page import page
from .record import Recorder, Run, read

__all__ = ["Recorder", "Run", "page", "read"]
