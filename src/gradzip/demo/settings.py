"""What the launcher tells its ranks, and the ranks the launcher: JSON both ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..capture import ModelSize

PLAIN, BF16, AUTO = "plain DDP", "cast:to=bf16", "auto"
POLICIES: dict[str, str | None] = {  # by the run's name, which is what users write
    PLAIN: None,
    BF16: BF16,
    "gcomp": "gcomp",
    "gcomp:keep=7": "gcomp:keep=7",
    "noise": "noise",
    "powersgd:rank=4": "powersgd:rank=4",
    "topk:ratio=0.01": "topk:ratio=0.01",
    AUTO: "auto:save=",
}
WORDS = {
    PLAIN: "FP32, as torch sends it",
    BF16: "BF16: half the bytes",
    "gcomp": "near-lossless: parameters within 1 ulp",
    "gcomp:keep=7": "BF16's error, two thirds of its bytes",
    "noise": "the default: zero-mean noise, budget 1 %",
    "powersgd:rank=4": "low rank with error feedback",
    "topk:ratio=0.01": "the largest 1 %, with error feedback",
    AUTO: "measures, then chooses",
    "gcomp:mode=lossless": "lossless: every bit is kept",
    "gcomp:ulps=256": "parameters within 256 ulps",
    "gcomp:ulps=4096": "parameters within 4096 ulps",
    "zstd": "lossless, for any data",
    "lz4": "lossless, for any data",
}
DESCRIBED = "gcomp"  # the run whose gradients and timeline the report shows
SIZE = ModelSize(width=192, blocks=6, batch=1)  # 2.8 M parameters, 11 MB of gradients

RUNS, PROFILE, SNAPSHOT = "run.jsonl", "profile.json", "snapshot.pt"  # files that the ranks leave behind
PLAN, PLANNED_FROM = "plan.json", "planned_from.json"  # of the run that plans, as far as it came
TRACE = "trace.json"  # of one step of the run that is described
_SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    seconds: float = 90.0  # for all runs together, more or less
    steps: int | None = None  # of each run; None: as many as the time allows
    hosts: int = 4
    rate: str = "1gbit"
    limit: bool = True  # False: over the loopback, with predictions instead of times
    width: int = SIZE.width
    blocks: int = SIZE.blocks
    batch: int = SIZE.batch
    policies: tuple[str, ...] = tuple(POLICIES)
    patience: float = 1.4  # times its share of the seconds, then a run ends early: the machine became busy

    @property
    def size(self) -> ModelSize:
        return ModelSize(self.width, self.blocks, self.batch)

    def save(self, folder: Path) -> None:
        (folder / _SETTINGS).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Settings:
        data = json.loads((folder / _SETTINGS).read_text())
        return cls(**{**data, "policies": tuple(data["policies"])})


@dataclass(frozen=True)
class Progress:
    """Rank 0 prints one after every step."""

    run: str
    step: int
    steps: int
    loss: float
    step_ms: float

    def line(self) -> str:
        return json.dumps({"progress": asdict(self)})

    @classmethod
    def read(cls, line: str) -> Progress | None:
        """None for any other line."""
        return cls(**json.loads(line)["progress"]) if line.startswith('{"progress": ') else None
