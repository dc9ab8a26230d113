"""What the tests of near mode's promise share: the exchange and the optimizer in float64, and cunning gradients.

The oracle of the promise is torch.optim itself, run on float64 copies. Sums over ranks are exact here, as they are in
float32 while they have fewer than 2^24 steps of the grid; what float32 loses beyond that it loses without a codec too.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import gradzip
from gradzip.engines.layout import COARSEST, EXACT, Job
from gradzip.engines.reference import map_values

KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "momentum": SGD,
    "nesterov": SGD,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
    "adam": Adam,
    "adamw": AdamW,
}
TYPICAL: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "adagrad": {"lr": 0.01},
    "rmsprop": {"lr": 0.01},
    "adam": {"lr": 1e-3},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.95)},
}


def exchange(ranks: np.ndarray, floors: np.ndarray) -> np.ndarray:
    """The mean that all ranks decode in near mode: (ranks, n) float32 -> (n,) float64."""
    floors = floors.astype(np.int64)
    coded = [map_values(rank.view(np.uint32), Job("near"), floors).view(np.float32) for rank in ranks]
    total = np.sum(np.array(coded, np.float64), axis=0)
    grid = np.exp2(np.minimum(floors + (len(ranks).bit_length() - 1), COARSEST).astype(np.float64))
    on_grid = np.where(np.abs(total) < grid * 2**24, np.rint(total / grid) * grid, total)
    return np.where(floors == EXACT, total, on_grid) / len(ranks)


def step_in_double(optimizer: Optimizer, gradient: np.ndarray) -> np.ndarray:
    """The optimizer's one parameter after a step with that gradient, all in float64; the optimizer is left alone."""
    (group,) = optimizer.param_groups
    (p,) = group["params"]
    copy = torch.nn.Parameter(p.detach().double())
    options = {k: v for k, v in group.items() if k in optimizer.defaults}
    if type(optimizer) is AdamW:
        del options["decoupled_weight_decay"]
    double = type(optimizer)([copy], **options)
    state = deepcopy(optimizer.state_dict()["state"])  # or both would count their steps in the same tensor
    double.load_state_dict({"state": state, "param_groups": double.state_dict()["param_groups"]})
    copy.grad = torch.from_numpy(gradient)
    double.step()
    return copy.detach().numpy()


def ulp(theta: np.ndarray) -> np.ndarray:
    """One unit in the last place of float32 values, as float64."""
    exponent = np.maximum(np.frexp(theta.astype(np.float64))[1] - 1, -126)
    return np.exp2(exponent - 23.0)


@dataclass(frozen=True)
class Setting:
    """One optimizer, how it was trained so far, and the step to take."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    past: int = 0  # steps already made
    theta_scale: float = 1.0
    ulps: float = 1
    scale: float = 1.0
    world: int = 1
    seed: int = 0
    size: int = 128
    optimizer: Optimizer = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", np.random.default_rng(self.seed))
        theta = torch.from_numpy(self._theta())
        parameter = torch.nn.Parameter(theta.clone())
        object.__setattr__(self, "optimizer", self.kind([parameter], **self.options))
        for gradient in self._history():
            parameter.grad = torch.from_numpy(gradient.astype(np.float32))
            self.optimizer.step()
            parameter.data.copy_(theta)  # only the state is wanted; some of these learning rates would diverge

    @property
    def parameter(self) -> torch.Tensor:
        p = self.optimizer.param_groups[0]["params"][0]
        assert isinstance(p, torch.Tensor)
        return p

    @property
    def theta(self) -> np.ndarray:
        return self.parameter.detach().numpy()

    def _theta(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 1)  # its own: the same parameters whatever came before
        values = rng.standard_normal(self.size) * np.exp2(rng.uniform(-12, 2, self.size)) * self.theta_scale
        values[::17] = 0
        values[5::17] = self.theta_scale  # a power of two: the smallest value of its ulp
        return values.astype(np.float32)

    def _history(self) -> np.ndarray:
        """Past gradients, oldest first. A quarter bring Adam's first moment as far ahead of its second as can be."""
        size = np.exp2(self.rng.uniform(-40, 8, self.size))
        age = np.arange(self.past)[::-1, None]
        noise = self.rng.standard_normal((self.past, self.size))
        b1, b2 = self.options.get("betas", (0.9, 0.99))
        kind = np.arange(self.size) % 4
        pattern = np.where(kind == 0, (b1 / b2) ** age, noise)
        pattern = np.where(kind == 1, np.sign(noise[:1]) * np.exp2(-age * self.rng.uniform(0, 2, self.size)), pattern)
        pattern = np.where((kind == 2) & (self.rng.random(pattern.shape) < 0.5), 0, pattern)
        return pattern * size

    def floors(self, ulps: float | None = None) -> np.ndarray:
        return gradzip.floors(self.optimizer, self.ulps if ulps is None else ulps, self.scale)[self.parameter].numpy()

    def gradients(self, floors: np.ndarray) -> np.ndarray:
        """What the ranks hold: (world, size). Half the columns lie just below the middle between two grid points."""
        (state,) = self.optimizer.state.values() if self.optimizer.state else ({},)
        moments = [state[k] for k in ("exp_avg_sq", "square_avg", "sum", "momentum_buffer") if state.get(k) is not None]
        typical = moments[0].abs().double().numpy() if moments else np.exp2(self.rng.uniform(-40, 8, self.size))
        if moments and "momentum_buffer" not in state:
            typical = np.sqrt(typical)
        b2 = self.options.get("betas", (0.0, self.options.get("alpha", 0.0)))[1]
        typical = typical / np.sqrt(1 - min(b2, 0.9999)) * np.exp2(self.rng.uniform(-3, 3, self.size))
        momentum = state["exp_avg"].numpy() if "exp_avg" in state else self.rng.standard_normal(self.size)
        target = -np.sign(momentum) * typical * self.scale  # against the momentum: Adam is most sensitive there

        grid = np.exp2(floors.astype(np.float64))
        steps = np.clip(np.rint(target / grid), -(2**21), 2**21)
        spread = self.rng.integers(-2, 3, (self.world, self.size)) * np.maximum(np.abs(steps), 1)
        offset = np.where(np.arange(self.size) % 2, 0.499, self.rng.uniform(-0.5, 0.5, (self.world, self.size)))
        tuned = (steps + np.clip(spread, -(2**21), 2**21).astype(np.int64) + offset) * grid
        values = np.where(floors == EXACT, target, tuned).astype(np.float32)
        return np.where((np.abs(values) >= 2.0**-125) & (np.abs(values) < 2.0**120), values, 0).astype(np.float32)

    def distances(self, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How far raw and coded gradients take the parameters apart, in ulps; and how sure float64 is of that."""
        ranks = self.gradients(floors)
        raw = step_in_double(self.optimizer, ranks.astype(np.float64).mean(0) / self.scale)
        coded = step_in_double(self.optimizer, exchange(ranks, floors) / self.scale)
        return np.abs(raw - coded) / ulp(self.theta), self._noise(ranks, raw) / ulp(self.theta)

    def _noise(self, ranks: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Rounding of the float64 oracle: a few of its ulps of the largest term in the update."""
        (state,) = self.optimizer.state.values() if self.optimizer.state else ({},)
        lr = float(self.options["lr"])
        buffer = state.get("momentum_buffer")
        largest = 0 if buffer is None else np.abs(buffer.double().numpy())
        largest = largest + (np.abs(ranks).mean(0) / self.scale if self.kind is SGD else 64.0)
        return 2.0**-49 * (np.abs(self.theta) + np.abs(after) + lr * largest)
