"""What a gradient goes through in a step (Way), and what follows from the ways of all of them (Scheme).

hooks/ways.py finds the ways of a policy.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch

from ..codecs import Codec
from ..codecs.gcomp import GComp
from ..engines.layout import Floor
from ..routes import FACTORS
from .coding import MessageCodec

PLAIN = "identity/allreduce"


@dataclass(frozen=True)
class Way:
    """What one parameter's gradient goes through in a step."""

    codec: Codec
    route: str
    late: bool  # waits for the last bucket
    floor: Floor | torch.Tensor | None
    whole: MessageCodec | None = None  # codes it with others, as one message
    kind: str = field(init=False, compare=False)  # codec and route, in words
    form: str | None = field(init=False, compare=False)  # how residuals are kept, as in Codec.error_memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", f"{self.codec}/{self.route}")
        object.__setattr__(self, "form", self.codec.error_memory)


class Scheme:
    """What follows from the ways of a step, found out once for all steps that have the same but for their floors."""

    def __init__(self, ways: Mapping[str, Way], streams: bool = False) -> None:
        """`streams`: by the stream runner."""
        self.ways, self.streams = ways, streams
        self._kinds = [way.kind for way in ways.values()]
        counts = Counter(self._kinds)
        self.words = ", ".join(f"{count} x {text}" for text, count in counts.items())
        pairs = repr(list(zip(ways, self._kinds)))
        self.digest = hashlib.blake2b(pairs.encode(), digest_size=4).hexdigest()  # of who gets what
        self.plain = set(counts) == {PLAIN}
        self.whole = any(way.whole is not None and not way.late for way in ways.values())
        self.shaped = any(way.codec.shaped for way in ways.values())
        self.graded = any(way.floor is not None for way in ways.values())
        self.factors = any(way.route == FACTORS for way in ways.values())
        self.all_late = not self.plain and all(way.late for way in ways.values())
        sharing = [way.codec for way in ways.values() if shares_book(way.codec)]
        self.book_limit = min((codec.limit for codec in sharing), default=0)  # of codes in the shared book; 0: none
        self.book_refresh = min((codec.refresh for codec in sharing), default=50)  # steps between two of these books

    def with_floors_of(self, ways: Mapping[str, Way]) -> Scheme | None:
        """The same for ways that differ in floors alone; None if they differ in more."""
        if list(ways) != list(self.ways) or [way.kind for way in ways.values()] != self._kinds:
            return None
        renewed = copy.copy(self)
        renewed.ways = ways
        return renewed


def shares_book(codec: Codec) -> TypeGuard[GComp]:
    return isinstance(codec, GComp) and codec.book == "shared"
