"""What a codec is measured on: a gradient, and the floors that near mode needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..capture import Snapshot
from ..codecs import Codec
from ..codecs.gcomp import GComp
from ..engines.layout import Floor
from ..errors import Unsupported


@dataclass(frozen=True)
class Sample:
    """A flat float32 gradient; `snapshot` is the training state around it, where there is one."""

    name: str
    values: torch.Tensor
    snapshot: Snapshot | None = None

    @classmethod
    def of(cls, snapshot: Snapshot, limit: int | None = None) -> Sample:
        return cls(f"step {snapshot.step}", snapshot.gradient[:limit], snapshot)

    @classmethod
    def load(cls, path: Path, limit: int | None = None) -> Sample:
        """A .npy file of float32, or a file of raw little-endian float32."""
        try:
            values = np.load(path) if path.suffix == ".npy" else np.fromfile(path, dtype="<f4")
        except (OSError, ValueError) as cause:
            raise Unsupported(f"cannot read {path}: {cause}") from cause
        if values.dtype != np.float32 or not values.size:
            raise Unsupported(f"{path} holds {values.size} x {values.dtype}; a gradient is float32 and not empty")
        return cls(path.name, torch.from_numpy(values.reshape(-1)[:limit].copy()))

    def floor(self, codec: Codec) -> Floor | None:
        """The floors that this codec needs for this gradient; None where it needs none."""
        if not (isinstance(codec, GComp) and codec.mode in ("near", "paper")):
            return None
        if self.snapshot is None:
            raise Unsupported(
                f"{codec} rounds to what the optimizer can feel, and {self.name} holds no optimizer state: "
                "measure it on the built-in gradients (without --input)"
            )
        if codec.mode == "paper":
            raise Unsupported("mode=paper has no benchmark yet: it needs the optimizer's reach, not a floor")
        return _floor(self.snapshot, codec.ulps)[: self.values.numel()]


def _floor(s: Snapshot, ulps: int) -> Floor:
    """AdamW's rule: a grid 2^f below which a change of the gradient moves theta by less than `ulps` units."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    sensitivity = 1.58 * s.lr * (1 - b1) / (1 - b1**s.step)  # of theta to the gradient, times the denominator
    c0 = math.floor(math.log2(ulps) - math.log2(sensitivity)) - 127 - 23
    c1 = math.floor(math.log2(b2 / (1 - b2**s.step))) - 127
    return Floor(s.theta, s.second, c0, c1, math.floor(2 * math.log2(eps)))
