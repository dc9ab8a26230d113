"""The process that owns an emulated cluster: the first of its namespaces, so that all of it ends when this ends.

Its standard input brings the job, then at most the request to stop; when that input closes, whoever started it is gone.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack
from typing import Any

from ..errors import EmulationError
from . import flows, mps, network
from .ranks import Abandoned, Ranks
from .report import Job, Report

_CONTROL = 0  # standard input
_PORT = 29500  # nobody else is in the namespace


def main(report_to: int) -> int:
    os.set_inheritable(report_to, False)
    job = Job.load(_first_line())
    with open(report_to, "w") as out:

        def report(kind: str, **fields: Any) -> None:
            print(json.dumps({"kind": kind} | fields), file=out, flush=True)

        try:
            _run(job, report)
        except EmulationError as error:
            report("error", message=str(error))
        except (Abandoned, BrokenPipeError):
            return 1
        return 0


def _run(job: Job, report: Report) -> None:
    cluster = job.cluster
    with ExitStack() as stack:
        if cluster.rate is None:
            hosts, port = network.loopback(cluster.hosts), _free_port()
        else:
            hosts, port = network.build(cluster.hosts, cluster.rate, job.tools), _PORT
        rates = flows.measure(hosts) if job.measure else None
        report("ready", rates=rates and [rates.one_flow, rates.ring])
        shared = {}
        if cluster.gpu_share and mps.CONTROL in job.tools:
            shared = stack.enter_context(mps.daemon(job.tools[mps.CONTROL]))
        ranks = Ranks(report, job.grace)
        stack.callback(ranks.kill)
        for rank in range(cluster.world):
            host = hosts[cluster.host_of(rank)]
            own = cluster.environment(rank, host.interface, (hosts[0].address, port))
            with host.entered():
                ranks.start(rank, job.command, os.environ | own | shared)
        ranks.watch(_CONTROL)
        report("end")


def _first_line() -> str:
    """Byte by byte, so that nothing of what follows is taken with it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(_CONTROL, 1)
        if not byte:
            raise SystemExit(1)
        line += byte
    return line.decode()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
