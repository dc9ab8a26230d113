"""The rows of the dial on four tasks, with the number of seeds.

Own gradients go in near mode in all rows but the two that say otherwise. The first runs were made when that was the
default and had no name; their policies in results.csv were since written as they are here.
"""

from workers.running import Run

ULPS = (16, 256, 4096, 65536)
DIAL = {
    "plain": ("plain", 3),
    "near": ("gcomp:own=near", 3),
    "near, own lossless": ("gcomp:own=lossless", 1),
    "near, own by itself": ("gcomp", 1),
    "plain, again": ("plain", 1),
    "bf16": ("cast", 1),
    "18 bits cut": ("gcomp:keep=5,round=truncate,feedback=false", 1),
    "keep=7": ("gcomp:keep=7", 1),
    "keep=5": ("gcomp:keep=5", 1),
    "keep=3": ("gcomp:keep=3", 1),
    **{f"ulps={ulps}": (f"gcomp:ulps={ulps},own=near", 1) for ulps in ULPS},
    **{f"ulps={ulps}, no feedback": (f"gcomp:ulps={ulps},own=near,feedback=false", 1) for ulps in ULPS},
    "near, feedback": ("gcomp:own=near,feedback=true", 1),
    "accordion 1/65536": ("accordion ~ gcomp:own=near ~ gcomp:ulps=65536,own=near ~ window=50", 1),
    "accordion 256/65536": ("accordion ~ gcomp:ulps=256,own=near ~ gcomp:ulps=65536,own=near ~ window=50", 1),
}
_WITH_SGD = (
    *("plain", "near", "near, own by itself", "plain, again", "bf16", "18 bits cut", "keep=7"),
    *("ulps=256", "ulps=65536"),
)
_MINUTES = {"gcomp-cifar": 1.2, "gcomp-sst2-adamw": 0.8, "gcomp-enwik8": 1.0, "gcomp-sst2-sgd": 0.8}  # beside others


def _probe(row: str) -> str:
    return "rates" if row == "plain" else ""


ROWS = [
    (Run("gcomp", task, row, policy, minutes=minutes, probe=_probe(row)), seeds)
    for task, minutes in _MINUTES.items()
    for row, (policy, seeds) in DIAL.items()
    if task != "gcomp-sst2-sgd" or row in _WITH_SGD
]

# GComp as published, in float32 and to the end of the same schedules: what a CPU has no time for (float32.py).
PRECISE = {
    "plain": "plain",
    "paper": "gcomp:mode=paper",
    "near": "gcomp:own=near",
    "18 bits cut": "gcomp:keep=5,round=truncate,feedback=false",
}
ROWS += [
    (Run("gcomp", task, row, policy, minutes=minutes, probe=_probe(row)), 1)
    for task, minutes in (("gcomp-cifar-float32", 3.3), ("gcomp-sst2-float32", 1.0))
    for row, policy in PRECISE.items()
]
