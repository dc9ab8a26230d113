"""What a plan is compared with: no compression, compression for free, and what other systems do with every tensor.

HiTopKComm and HiPress code on the GPU between the steps inside a host; HiPress leaves all but large tensors alone, and
decodes before it spreads inside the host. BytePS-Compress codes on the CPU and encodes again at the server. As in
Espresso's own comparison (EuroSys'23) all of them use the codec at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..codecs import parse
from ..option import Option
from ..routes import Route
from .choices import PLAIN_CODEC, Limits
from .network import Network
from .problem import Problem
from .search import search
from .units import Unit

BF16 = str(parse("cast:to=bf16"))
HIPRESS_LEAST = 16 << 20  # elements; real HiPress decides by fitted costs, see SeCoPa
HITOPK_LEAST = 32 << 10

_SYSTEMS = {
    "HiTopKComm": ("rs.intra > enc.gpu > ag.inter > ag.intra > dec.gpu", "enc.gpu > ag.flat > dec.gpu"),
    "HiPress": ("rs.intra > enc.gpu > ag.inter > dec.gpu > ag.intra", "enc.gpu > ag.flat > dec.gpu"),
    "BytePS-Compress": (
        "rs.intra > enc.cpu > a2a.inter > dec.cpu > enc.cpu > ag.inter > dec.cpu > ag.intra",
        "enc.cpu > a2a.flat > dec.cpu > enc.cpu > ag.flat > dec.cpu",
    ),
}


@dataclass(frozen=True)
class Baseline:
    name: str
    step_s: float | None  # None: cannot be told from this profile
    note: str = ""


def plain_option() -> Option:
    return Option(PLAIN_CODEC, None, "allreduce")


def baselines(
    network: Network, units: list[Unit], limits: Limits, *, hipress_least: int = HIPRESS_LEAST
) -> list[Baseline]:
    """FP32 first; then BF16, the fixed strategies, and compression for free."""
    found = [Baseline("FP32 all-reduce", Problem(network, units, Limits(codecs=())).plain_s)]
    cast = [str(cost.codec) for cost in network.profile.codecs.values() if str(cost.codec) == BF16]
    found.append(_bf16(network, units) if cast else Baseline("BF16 all-reduce", None, "cast:to=bf16 was not measured"))
    everything = Problem(network, units, limits)
    for name, (hierarchical, flat) in _SYSTEMS.items():
        least = {"HiPress": hipress_least, "HiTopKComm": HITOPK_LEAST}.get(name, 1)
        found.append(_fixed(everything, name, hierarchical, flat, least))
    free = Problem(network, units, limits, free=True)
    plain_s, free_s = found[0].step_s, free.outside_s + search(free).time_s
    if plain_s is not None and plain_s < free_s:  # a plan may also leave everything uncompressed
        found.append(Baseline("free compression (bound)", plain_s, "even free, it would not beat FP32"))
    else:
        found.append(Baseline("free compression (bound)", free_s))
    return found


def _bf16(network: Network, units: list[Unit]) -> Baseline:
    problem = Problem(network, units, Limits(codecs=(BF16,)))
    if network.by_nccl:
        return Baseline("BF16 all-reduce", problem.ddp_s(0.5), "torch's hook, by NCCL; conversion is not counted")
    return Baseline("BF16 all-reduce", problem.step_s(problem.uniform(Option(BF16, problem.device, "allreduce"))))


def _fixed(problem: Problem, name: str, hierarchical: str, flat: str, least: int) -> Baseline:
    """The system's route for every unit that is large enough, with the codec that suits it best."""
    topology = problem.network.topology
    both = topology.hosts > 1 and topology.ranks_per_host > 1
    route = Route.parse(hierarchical if both else flat)
    if problem.device == "cpu":
        route = route.on("cpu")
    large = np.array([sum(t.numel for t in unit.tensors) >= least for unit in problem.units])
    times = []
    for cost in {str(c.codec.codec): c.codec for c in problem.choices if c.codec is not None}:
        number = problem.number.get(Option(cost, None, str(route)))
        if number is not None:
            times.append((problem.step_s(np.where(large, number, 0).astype(np.int32)), cost))
    if not times:
        return Baseline(name, None, "no codec on offer has this route on this device")
    step_s, codec = min(times)
    return Baseline(name, step_s, f"{codec}, {int(large.sum())} of {len(large)} compressed")
