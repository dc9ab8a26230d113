"""An Option says how one gradient travels: which codec, on which device, by which route.

Its text form is `codec[@device][/route]`, for example `powersgd:rank=2@gpu/factors`. What is left out is chosen
where the option is used. The codec stays text here, so that plans are read and written without any tensor code;
whoever uses the option checks codec and route.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import Unsupported, nearest

DEVICES = ("cpu", "gpu")

_CODEC = re.compile(r"[a-z]\w*(:[^@/\s]+)?")
_ROUTE = re.compile(r"[a-z][\w.]*( > [a-z][\w.]*)*")


@dataclass(frozen=True)
class Option:
    """One way to exchange a gradient; `Option.parse(str(option)) == option`."""

    codec: str  # the codec's text form
    device: str | None = None  # where it is coded: cpu or gpu; None: where the gradient lies
    route: str | None = None  # a route's name, or its steps as `step > step`; None: the codec's usual one

    def __post_init__(self) -> None:
        if not _CODEC.fullmatch(self.codec):
            raise Unsupported(f"cannot read the codec {self.codec!r}: write it as name or name:key=value,key=value")
        if self.device is not None and self.device not in DEVICES:
            raise Unsupported(
                f"unknown device {self.device!r}{nearest(self.device, DEVICES)}; choose {' or '.join(DEVICES)}"
            )
        if self.route is not None and not _ROUTE.fullmatch(self.route):
            raise Unsupported(f"cannot read the route {self.route!r}: write a name, or steps as `step > step`")

    @classmethod
    def parse(cls, text: str | Option) -> Option:
        """The option of a text form; an Option is returned as it is."""
        if isinstance(text, Option):
            return text
        if not isinstance(text, str):
            raise Unsupported(f"{text!r} is not an option: write a text such as 'topk:ratio=0.01@gpu/alltoall'")
        head, slash, route = text.partition("/")
        codec, at, device = head.partition("@")
        steps = " > ".join(step.strip() for step in route.split(">"))
        return cls(re.sub(r"\s", "", codec), device.strip() if at else None, steps if slash else None)

    def __str__(self) -> str:
        return self.codec + (f"@{self.device}" if self.device else "") + (f"/{self.route}" if self.route else "")
