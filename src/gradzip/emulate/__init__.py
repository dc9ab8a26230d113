"""A cluster on one machine: a command runs on N emulated hosts, joined by links of a chosen rate.

    result = gradzip.emulate.run(["python", "train.py"], hosts=4, rate="1gbit")

Every host is a network namespace with an address of its own. All of it lives in namespaces that the kernel takes apart
when their first process ends, however it ends, so nothing stays behind and the machine's own network is not touched.

    launch       outside: checks what is there, starts the supervisor in fresh namespaces, passes on what it reports
    supervisor   inside: builds the network, measures it, starts the ranks, ends them
    ranks        the processes: their output, the first failure, how they are ended
    network      bridge, links, limits            flows       the rates that TCP really reaches
    cluster      shape, rates, environment        mps         several ranks on one GPU

Only the standard library is imported here: the supervisor starts without torch.
"""

from __future__ import annotations

from .cluster import Cluster, format_rate, parse_rate
from .launch import Line, Result, obstacle, run
from .report import Rates

__all__ = ["Cluster", "Line", "Rates", "Result", "format_rate", "obstacle", "parse_rate", "run"]
