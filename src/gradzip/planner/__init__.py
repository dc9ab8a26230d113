"""The planner: will compression help, how much, with what, and what bandwidth is needed?

profile     what was measured: profile.json           models      profiles that ship
network     what collectives cost on any cluster      cost        what the steps of a route cost
choices     everything that a gradient may do         units       tensors, or the buckets that DDP makes of them
timeline    one backward pass, by rules (reference)   fast        the same in C++
chunks      how the runner cuts units                 problem     units, choices and their times
search      Espresso's algorithms, and passes beyond  baselines   what others would do
answer      the plan, compared and explained          perfetto    timelines to look at
measure     makes profile.json from a running script
"""

from __future__ import annotations

from pathlib import Path


def inject_folder() -> Path:
    """The folder whose sitecustomize.py makes Python measure the script that it runs."""
    return Path(__file__).parent / "inject"
