"""Accordion: compress little while training is in a critical regime, and much otherwise.

Agarwal et al., "Accordion: Adaptive gradient communication via critical learning regime identification" (MLSys 2021).
For each layer, n is the norm of a window's summed gradient. Where it has changed by half or more since the window
before, the layer is critical. So is every layer in the first window, and after a drop of the learning rate.

The authors' code looks at rank 0's own gradient and tells the others. Here all ranks look at the mean, which is the
same on all of them to the last bit, and take its norm in a way that gives the same bits whatever the order of
summation. So all decide alike without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import saved
from .codecs import Codec
from .errors import Unsupported, nearest
from .option import Option
from .policy import Policy, as_policy

_CHUNK = 1 << 22  # values whose squares, of up to 40 bits each, fit in 63 bits together
_BITS = 20


class Accordion:
    """`low` compression for layers that are critical, `high` for the others: a codec's text form or a Policy each.

    A window is `window` steps. With `epochs` it is one epoch out of so many (10 in the paper), and the user calls
    `Handle.end_epoch`. A layer is critical if its norm has changed by `threshold` or more, relative to the norm before.
    All layers are, until the next check, when a learning rate falls to 1/`lr_drop` or less within a window; 1 is the
    paper's rule, any fall at all, which a cosine schedule meets in every step.

    It holds the sum of a window's gradients: a float32 copy of each layer that it decides on. The norm of a sum does
    not follow from norms, so there is no smaller faithful form; with `epochs` the copy lives one epoch out of so many.
    """

    def __init__(
        self,
        low: str | Codec | Option | Policy,
        high: str | Codec | Option | Policy,
        *,
        window: int = 500,
        epochs: int | None = None,
        threshold: float = 0.5,
        lr_drop: float = 2.0,
    ) -> None:
        if window < 1 or (epochs is not None and epochs < 1):
            raise Unsupported(f"Accordion(window={window}, epochs={epochs}): at least one step, or one epoch")
        if not 0 < threshold < math.inf:
            raise Unsupported(f"Accordion(threshold={threshold}): a relative change above 0, such as 0.5")
        if not 1 <= lr_drop < math.inf:
            raise Unsupported(f"Accordion(lr_drop={lr_drop}): at least 1, such as 2 for half the learning rate")
        self.low, self.high = as_policy(low), as_policy(high)
        self.window, self.epochs, self.threshold, self.lr_drop = window, epochs, threshold, lr_drop
        self.history: list[dict[str, Any]] = []  # one entry for each check and each drop of the learning rate
        self._decided: dict[str, bool] = {}  # by name: whether low and high differ there
        self._critical: dict[str, bool] = {}
        self._norms: dict[str, float] = {}  # of the window before
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = self._epochs = 0
        self._rates: list[float] = []  # the highest since the last check or drop

    def __repr__(self) -> str:
        when = f"window={self.window}" if self.epochs is None else f"epochs={self.epochs}"
        return f"Accordion({self.low}, {self.high}, {when}, threshold={self.threshold}, lr_drop={self.lr_drop})"

    def option(self, name: str, shape: Sequence[int]) -> Option:
        low, high = self.low.option(name, shape), self.high.option(name, shape)
        self._decided[name] = low != high
        return low if self._critical.get(name, True) else high

    @property
    def _measuring(self) -> bool:
        return self.epochs is None or self._epochs % self.epochs == 0

    def observe(self, name: str, mean: torch.Tensor, scale: float = 1.0) -> None:
        if not self._measuring or not self._decided.get(name, False):
            return
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(mean, dtype=torch.float32)
        self._sums[name].add_(mean, alpha=1 / scale)

    def end_step(self, rates: Sequence[float]) -> None:
        self._steps += 1
        if self._dropped(rates):
            self._critical = dict.fromkeys(self._critical, True)
            self._note("learning rate", {})
        if self.epochs is None and self._steps % self.window == 0:
            self._check()
            self._rates = list(rates)

    def end_epoch(self) -> None:
        if self.epochs is not None and self._measuring:
            self._check()
        self._epochs += 1

    def _dropped(self, rates: Sequence[float]) -> bool:
        """Whether a learning rate has fallen far enough since the last check or drop."""
        if len(rates) != len(self._rates):
            self._rates = list(rates)
        highest = [max(pair) for pair in zip(self._rates, rates)]
        nearly = 1 + 1e-9  # 0.1 * 0.1 is a little more than a tenth of 0.1
        dropped = any(now < was and now * self.lr_drop <= was * nearly for now, was in zip(rates, highest))
        self._rates = list(rates) if dropped else highest
        return dropped

    def _check(self) -> None:
        ratios = {}
        for name, total in self._sums.items():
            norm, before = exact_norm(total), self._norms.get(name)
            ratios[name] = abs(before - norm) / before if before else math.inf
            self._critical[name] = not ratios[name] < self.threshold  # also where it is no number
            self._norms[name] = norm
        self._sums = {}
        self._note("check", ratios)

    def _note(self, cause: str, ratios: dict[str, float]) -> None:
        critical = [name for name, is_critical in self._critical.items() if is_critical]
        entry = {"step": self._steps, "cause": cause, "critical": critical, "layers": len(self._critical)}
        self.history.append(entry | {"ratios": ratios})

    def held(self) -> int:
        return sum(total.nbytes for total in self._sums.values())

    def state_dict(self) -> dict[str, torch.Tensor | int | float]:
        state: dict[str, torch.Tensor | int | float] = {"steps": self._steps, "epochs": self._epochs}
        state |= {f"rate/{i}": rate for i, rate in enumerate(self._rates)}
        state |= {f"critical/{name}": int(critical) for name, critical in self._critical.items()}
        state |= {f"norm/{name}": norm for name, norm in self._norms.items()}
        return state | {f"sum/{name}": total.clone() for name, total in self._sums.items()}

    def load_state_dict(
        self,
        state: Mapping[str, torch.Tensor | int | float],
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Goes on from a state; one that does not fit is refused, and nothing is changed. `shapes` are the model's."""
        parts: dict[str, dict[str, Any]] = {"rate": {}, "critical": {}, "norm": {}, "sum": {}}
        for key, value in state.items():
            kind, slash, name = key.partition("/")
            if slash:
                if kind not in parts:
                    raise Unsupported(f"{key!r} is no part of an Accordion's state: was it saved by another policy?")
                if shapes is not None and kind != "rate" and name not in shapes:
                    raise Unsupported(f"the state is of another model: this one has no {name!r}{nearest(name, shapes)}")
                parts[kind][name] = value
        steps, epochs = saved.counter(state, "steps"), saved.counter(state, "epochs")
        rates = [saved.number(state, f"rate/{i}") for i in range(len(parts["rate"]))]
        critical = {name: bool(saved.counter(state, f"critical/{name}", most=1)) for name in parts["critical"]}
        norms = {name: saved.number(state, f"norm/{name}") for name in parts["norm"]}
        sums = {
            name: saved.floats(f"sum/{name}", total, None if shapes is None else shapes[name]).clone()
            for name, total in parts["sum"].items()
        }
        self._steps, self._epochs, self._rates = steps, epochs, rates
        self._critical, self._norms, self._sums = critical, norms, sums


def exact_norm(x: torch.Tensor) -> float:
    """The Euclidean norm to about 4 digits, with the same bits on every device and number of threads.

    Values become integers of 20 bits, relative to the largest magnitude. Sums of integers do not depend on their order.
    """
    flat = x.detach().reshape(-1)
    largest = float(flat.abs().amax()) if flat.numel() else 0.0
    if largest == 0 or not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    unit = 2.0 ** (_BITS - exponent)
    chunks = [flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK)]
    squares = [(chunk.double() * unit).round().long().square().sum() for chunk in chunks]
    return math.ldexp(math.sqrt(sum(torch.stack(squares).tolist())), exponent - _BITS)
