"""The demo: one small model, trained with each codec in turn by the same ranks, on a network that is really slow.

    launch      outside: starts the ranks on emulated hosts, follows them, and puts together what they found
    ranks       inside: what every rank runs
    settings    what both must know
    verdict     what training takes plainly and with gradzip, in a sentence

Where hosts cannot be emulated the ranks train over the loopback; times on a network are then predicted by the planner
from what was measured, and labelled so.
"""

from __future__ import annotations

from .launch import Result, run
from .settings import Progress, Settings

__all__ = ["Progress", "Result", "Settings", "run"]
