"""A small profile for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradzip.codecs import parse
from gradzip.planner.profile import CodecCost, Collective, Curve, Link, Profile, Tensor

KINDS = ("ar", "rs", "ag", "a2a", "red", "gat", "bc")


def line(latency_s: float, s_per_byte: float) -> Curve:
    return Curve(tuple((size, latency_s + s_per_byte * size) for size in (1e4, 1e6, 1e8)))


def codec(text: str, ratio: float, *, grows: bool = False) -> CodecCost:
    curves = {"cpu": Curve(line(0.0, 1e-9 / 8).points, 1e-5)}
    return CodecCost(parse(text), ratio, curves, curves, grows=grows)


def profile(hosts: int = 4, rate: float = 1e9, **changes: Any) -> Profile:
    """A CPU model of four tensors on hosts with one rank each, measured with a perfect network of that rate."""
    factors = {"ar": 2 * (hosts - 1) / hosts, "rs": (hosts - 1) / hosts, "a2a": (hosts - 1) / hosts}
    collectives = [
        Collective(kind, "inter", hosts, line(100e-6, factors.get(kind, hosts - 1) * 8 / rate)) for kind in KINDS
    ]
    sizes = {"head": (100, 1000), "bias": (1000,), "middle": (1000, 1000), "stem": (2000, 1000)}
    tensors = [Tensor(name, shape, 0.01 * (i + 1)) for i, (name, shape) in enumerate(sizes.items())]
    whole = Profile(
        model="small",
        tensors=tuple(tensors),
        forward_s=0.02,
        backward_s=0.04,
        optimizer_s=0.002,
        hosts=hosts,
        ranks_per_host=1,
        transport="host",
        codecs={
            str(c.codec): c
            for c in (codec("gcomp:mode=lossless", 1.2), codec("cast", 2.0), codec("topk", 60.0, grows=True))
        },
        collectives=tuple(collectives),
        links={"inter": Link(rate, rate)},
    )
    return replace(whole, **changes)
