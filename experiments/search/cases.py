"""Small random planning problems: few units, few choices, everything else as in a real one."""

from __future__ import annotations

import numpy as np

from gradzip.codecs import parse
from gradzip.planner.choices import Limits
from gradzip.planner.network import Network, Topology
from gradzip.planner.problem import Problem
from gradzip.planner.profile import CodecCost, Collective, Curve, Link, Profile, Tensor
from gradzip.planner.units import tensors

KINDS = ("ar", "rs", "ag", "a2a", "red", "gat", "bc")


def random_profile(rng: np.random.Generator, units: int, devices: tuple[str, ...] = ("cpu", "gpu")) -> Profile:
    """Times and sizes over the range in which compression may or may not pay."""
    sizes = rng.choice([1, 4, 16, 64], size=units) * 2**18  # values; equal sizes are common, as in real models
    ready = np.cumsum(rng.uniform(0.2e-3, 20e-3, units))
    hosts, local = int(rng.integers(2, 9)), int(rng.choice([1, 2, 8]))
    inter, intra = 10 ** rng.uniform(9, 11), 10 ** rng.uniform(11, 12)
    collectives = []
    for group, peers, rate, share in (("inter", hosts, inter, local), ("intra", local, intra, 1)):
        for kind in KINDS if peers > 1 else ():
            factor = {"ar": 2 * (peers - 1) / peers, "rs": (peers - 1) / peers, "a2a": (peers - 1) / peers}
            slope = factor.get(kind, peers - 1) * share * 8 / rate
            latency = rng.uniform(10e-6, 200e-6)
            points = tuple((size, latency + slope * size) for size in (1e5, 1e8))
            collectives.append(Collective(kind, group, peers, Curve(points)))
    speed = {"gpu": 10 ** rng.uniform(10, 11.5), "cpu": 10 ** rng.uniform(9, 10.3)}
    late = {"gpu": rng.uniform(20e-6, 200e-6), "cpu": rng.uniform(5e-6, 50e-6)}
    together = rng.random() < 0.5  # one call for all frames, or one for each
    curves = {d: _curve(late[d], speed[d], together) for d in devices}
    codec = parse("topk") if rng.random() < 0.3 else parse("gcomp:keep=7")
    cost = CodecCost(
        codec,
        float(rng.choice([1.3, 3.0, 20.0])),
        curves,
        curves,
        grows=codec.name == "topk",
    )
    copies = Curve(((1e5, 1e-5 + 1e5 / 12e9), (1e8, 1e-5 + 1e8 / 12e9)))
    return Profile(
        model="random",
        tensors=tuple(Tensor(f"t{i}", (int(n),), float(r)) for i, (n, r) in enumerate(zip(sizes, ready))),
        forward_s=0.0,
        backward_s=float(ready[-1]),
        optimizer_s=0.0,
        hosts=hosts,
        ranks_per_host=local,
        transport=str(rng.choice(["host", "nccl"])),
        codecs={str(codec): cost},
        collectives=tuple(collectives),
        links={"inter": Link(inter), "intra": Link(intra)},
        copies={"host_to_device": copies, "device_to_host": copies} if "gpu" in devices else {},
    )


def _curve(latency_s: float, rate: float, together: bool) -> Curve:
    points = tuple((s, latency_s * together + s / rate) for s in (1e5, 1e8))
    return Curve(points, 0.0 if together else latency_s)


def random_problem(
    rng: np.random.Generator, units: int, choices: int | None = None, devices: tuple[str, ...] = ("cpu", "gpu")
) -> Problem:
    """`choices`: keep so many compressed ones, drawn at random, and their twins on the CPU."""
    profile = random_profile(rng, units, devices)
    network = Network(profile, Topology.of(profile))
    lossy = Limits(lossy=True)
    whole = Problem(network, tensors(profile), lossy)
    if choices is None:
        return whole
    compressed = [i for i in range(whole.primary) if whole.choices[i].compresses]
    kept = rng.choice(compressed, size=min(choices, len(compressed)), replace=False)
    allowed = {whole.choices[i].option for i in kept}
    allowed |= {whole.choices[j].option for i in kept if (j := whole.offloaded[i]) is not None}
    return Problem(network, tensors(profile), Limits(lossy=True, allow=allowed.__contains__))
