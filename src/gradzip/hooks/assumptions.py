"""What near mode takes for granted about the optimizer's step, watched while training runs.

Grids are computed during backward, from the settings that the optimizer has then, for gradients as they then are. A
learning rate that is raised before the step, or a gradient that is made larger, lets dropped bits matter after all.
Smaller ones are harmless: clipping, and loss scales taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

_EVERY = 50  # steps between two looks at gradients, which wait for the device
_TENSORS, _VALUES = 8, 16  # that are looked at
_NEARLY = 1 + 1e-3  # a loss scale that is multiplied by its inverse gives or takes a little

Settings = list[dict[str, Any]]


class Assumptions:
    """Watches the steps of all optimizers of a model."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], warn: Callable[[str], None]) -> None:
        self._watched = [_Watched(optimizer, warn) for optimizer in optimizers]

    def remove(self) -> None:
        for each in self._watched:
            each.remove()

    def begin(self, active: bool) -> None:
        """A backward begins; `active`: grids are used in it."""
        for each in self._watched:
            each.begin(active)

    @property
    def samples(self) -> bool:
        """Whether gradients are looked at in this step."""
        return any(each.samples for each in self._watched)

    def sample(
        self, names: Mapping[str, torch.Tensor], results: Iterable[tuple[str, torch.Tensor]], scale: float
    ) -> None:
        """Keeps a few values of the averaged gradients, for each optimizer of those that it will use."""
        found = [(names[name], mean) for name, mean in results if mean.is_contiguous()]
        for each in self._watched:
            if each.samples:
                each.sample(found, scale)


class _Watched:
    """Compares what backward saw with what one optimizer's step finds; says so once where they differ."""

    def __init__(self, optimizer: torch.optim.Optimizer, warn: Callable[[str], None]) -> None:
        self._optimizer, self._warn = optimizer, warn
        self._seen: Settings | None = None
        self._sampled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def remove(self) -> None:
        self._hook.remove()

    def begin(self, active: bool) -> None:
        self._seen = settings(self._optimizer) if active else None
        self._sampled = []

    @property
    def samples(self) -> bool:
        return self._seen is not None and self._steps % _EVERY == 0

    def sample(self, results: Iterable[tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        chosen = [(p, mean) for p, mean in results if p in own][:_TENSORS]
        self._sampled = [(p, mean.view(-1)[:_VALUES].abs() / scale) for p, mean in chosen]

    def _before_step(self) -> None:
        seen, self._seen = self._seen, None
        sampled, self._sampled = self._sampled, []
        self._steps += 1
        if seen is None:
            return
        if len(seen) != len(self._optimizer.param_groups):
            self._warn("near mode: parameter groups were added between backward and optimizer.step(): do so before")
            return
        for then, now in zip(seen, settings(self._optimizer)):
            for key, value in now.items():
                if value != then.get(key) and not (key == "lr" and value < then["lr"]):
                    self._warn(
                        f"near mode: the optimizer's {key} was {then.get(key)} in backward and is {value} in its step, "
                        "so bits may have been dropped that matter. Change settings after the step: "
                        "optimizer.step(), then scheduler.step()"
                    )
                    return
        if getattr(self._optimizer, "grad_scale", None) is None and _grew(sampled):
            self._warn(
                "near mode: gradients were made larger between backward and optimizer.step(), so bits may have been "
                "dropped that matter. Scale the loss instead; under a GradScaler, attach(..., scaler=scaler)"
            )


def settings(optimizer: torch.optim.Optimizer) -> Settings:
    """The hyper-parameters of each group, as values that do not change with it."""
    return [
        {key: _frozen(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    ]


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_frozen, value)) if isinstance(value, tuple | list) else value


def _grew(sampled: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether a gradient has a value larger than it was; asks the device once."""
    larger = [
        (p.grad.detach().view(-1)[: most.numel()].abs() > most * _NEARLY).any()
        for p, most in sampled
        if p.grad is not None and p.grad.layout == torch.strided and p.grad.is_contiguous()
    ]
    return bool(larger) and bool(torch.stack(larger).any())
