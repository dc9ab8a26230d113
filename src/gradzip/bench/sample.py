"""What a codec is measured on: a gradient, and the floors that near mode needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..capture import Snapshot
from ..codecs import Codec
from ..codecs.gcomp import GComp, is_reach, reach_exponents
from ..engines.layout import Floor
from ..errors import Unsupported
from ..sensitivity import reaches, rules


@dataclass(frozen=True)
class Sample:
    """A flat float32 gradient; `snapshot` is the training state around it, where there is one."""

    name: str
    values: torch.Tensor
    snapshot: Snapshot | None = None
    sizes: tuple[int, ...] | None = None  # values of each parameter, one behind the other; None: it is one tensor

    @classmethod
    def of(cls, snapshot: Snapshot, limit: int | None = None, sizes: tuple[int, ...] | None = None) -> Sample:
        return cls(f"step {snapshot.step}", snapshot.gradient[:limit], snapshot, sizes)

    @classmethod
    def load(cls, path: Path, limit: int | None = None) -> Sample:
        """A .npy file of float32, a file of raw little-endian float32, or a Snapshot saved by torch as a .pt file."""
        try:
            if path.suffix == ".pt":
                snapshot = Snapshot(**torch.load(path, weights_only=True))
                return cls(path.name, snapshot.gradient[:limit], snapshot)
            values = np.load(path) if path.suffix == ".npy" else np.fromfile(path, dtype="<f4")
        except (OSError, ValueError, TypeError) as cause:
            raise Unsupported(f"cannot read {path}: {cause}") from cause
        if values.dtype != np.float32 or not values.size:
            raise Unsupported(f"{path} holds {values.size} x {values.dtype}; a gradient is float32 and not empty")
        return cls(path.name, torch.from_numpy(values.reshape(-1)[:limit].copy()))

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat`, which has a number for each value, cut into parameters."""
        ends = np.cumsum(self.sizes or (self.values.numel(),)).clip(max=self.values.numel())
        return [flat[start:end] for start, end in zip([0, *ends], ends) if start < end]

    def floor(self, codec: Codec) -> torch.Tensor | Floor | None:
        """The floors (or reaches, in paper mode) that this codec needs for this gradient; None where it needs none."""
        if not (isinstance(codec, GComp) and codec.mode in ("near", "paper")):
            return None
        if self.snapshot is None:
            raise Unsupported(
                f"{codec} rounds to what the optimizer can feel, and {self.name} holds no optimizer state: "
                "measure it on the built-in gradients (without --input)"
            )
        optimizer = self.snapshot.optimizer()
        per_parameter = rules(optimizer, codec.ulps) if codec.mode == "near" else reaches(optimizer)
        (floor,) = per_parameter.values()  # the snapshot's optimizer has one flat parameter
        if floor is None:
            return None
        here = floor[: self.values.numel()]
        return reach_exponents(self.values, here) if is_reach(here) else here
