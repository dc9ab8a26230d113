"""What is kept of a tensor: one interface, one registry."""

from . import baseline, gcomp
from .base import BY_ID, REGISTRY, Codec, Context, parse, register

__all__ = ["BY_ID", "REGISTRY", "Codec", "Context", "baseline", "gcomp", "parse", "register"]
