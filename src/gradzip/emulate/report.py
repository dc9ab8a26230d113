"""What the supervisor and the process that started it say to each other: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .cluster import Cluster

Report = Callable[..., None]  # report("exit", rank=3, code=1)


@dataclass(frozen=True)
class Rates:
    """TCP's payload in bit/s: what a link of rate r can carry is 0.957 r."""

    one_flow: float
    ring: tuple[float, ...]  # every host to the next, all at once


@dataclass(frozen=True)
class Job:
    command: list[str]
    cluster: Cluster
    measure: bool
    grace: float
    tools: dict[str, str]  # name of a program: its path

    def dump(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def load(text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        cluster = fields.pop("cluster")
        return Job(cluster=Cluster(**cluster | {"gpus": tuple(cluster["gpus"])}), **fields)
