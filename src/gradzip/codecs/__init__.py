"""What is kept of a tensor: one interface, one registry."""

from . import baseline, dgc, gcomp, lowrank, noise, quantized, scaled, sparse
from .base import BY_ID, REGISTRY, Codec, Context, parse, register

__all__ = [
    "BY_ID",
    "REGISTRY",
    "Codec",
    "Context",
    "baseline",
    "dgc",
    "gcomp",
    "lowrank",
    "noise",
    "parse",
    "quantized",
    "register",
    "scaled",
    "sparse",
]
