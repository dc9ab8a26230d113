"""What is kept of a tensor: one interface, one registry."""

from . import baseline, gcomp, lowrank, sparse
from .base import BY_ID, REGISTRY, Codec, Context, parse, register

__all__ = ["BY_ID", "REGISTRY", "Codec", "Context", "baseline", "gcomp", "lowrank", "parse", "register", "sparse"]
