"""Which parameters of an optimizer can be analysed, with their hyper-parameters as plain numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from ..errors import warn

# By exact type: a subclass may do anything in its step.
KNOWN: tuple[type[Optimizer], ...] = (SGD, Adagrad, RMSprop, Adam, AdamW)

_warned: set[str] = set()


class Case(NamedTuple):
    """One parameter about to be stepped."""

    parameter: torch.Tensor
    kind: type[Optimizer]
    group: Mapping[str, Any]  # hyper-parameters; numbers, never tensors
    defaults: Mapping[str, Any]  # those that the optimizer was made with
    state: Mapping[str, Any]  # empty before the first step
    steps: float  # updates made so far

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for parameters of one survey that are stepped by the same formula with the same numbers."""
        return id(self.group), self.steps, self.state.get("momentum_buffer") is None

    def number(self, name: str) -> float:
        """A hyper-parameter."""
        return float(self.group[name])

    @property
    def betas(self) -> tuple[float, float]:
        return self.group["betas"][0], self.group["betas"][1]

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor of the state; None where there is none yet."""
        value = self.state.get(name)
        return value if isinstance(value, torch.Tensor) else None


class States(NamedTuple):
    """What an optimizer keeps for its parameters, compared without looking any of them up: that takes Python's hash."""

    optimizer: Optimizer
    parameters: list[torch.Tensor]
    states: list[Mapping[str, Any]]
    empty: list[Mapping[str, Any]]  # those without any field yet

    @classmethod
    def of(cls, optimizer: Optimizer) -> States:
        states = list(optimizer.state.values())
        return cls(optimizer, list(optimizer.state), states, [state for state in states if not state])

    def have_changed(self) -> bool:
        now = self.optimizer.state
        return (
            len(now) != len(self.states)
            or not all(map(operator.is_, now, self.parameters))
            or not all(map(operator.is_, now.values(), self.states))
            or any(self.empty)
        )


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's and Lightning's, which keep it as `.optimizer`."""
    while type(optimizer) not in KNOWN:
        inner: Any = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) and not hasattr(inner, "optimizer"):
            break
        optimizer = inner
    return optimizer


Read = Callable[[Sequence[torch.Tensor]], list[float]]  # fetches numbers of one element each


def fetch(numbers: Sequence[torch.Tensor]) -> list[float]:
    """One transfer for each device that they are on."""
    devices = {number.device for number in numbers}
    if len(devices) == 1:
        return _values(numbers)
    result = [0.0] * len(numbers)
    for device in devices:
        places = [i for i, number in enumerate(numbers) if number.device == device]
        for i, value in zip(places, _values([numbers[i] for i in places])):
            result[i] = value
    return result


def _values(numbers: Sequence[torch.Tensor]) -> list[float]:
    with torch.no_grad():
        flat = [number if number.dim() == 0 else number.reshape(()) for number in numbers]
        return list(map(float, torch.stack(flat).tolist()))


def survey(
    optimizer: Optimizer, wanted: Set[torch.Tensor] | None = None, read: Read = fetch
) -> Iterator[tuple[torch.Tensor, Case | None]]:
    """Each parameter, or each one wanted, with its Case, or with None where nothing can be said and a warning was
    given. `read` fetches step counts."""
    optimizer = unwrap(optimizer)
    kind = type(optimizer)
    groups = [
        (group, group["params"] if wanted is None else [p for p in group["params"] if p in wanted])
        for group in optimizer.param_groups
    ]
    if kind not in KNOWN:
        names = ", ".join(known.__name__ for known in KNOWN)
        warn_lossless(f"the optimizer {kind.__module__}.{kind.__qualname__}", f"only {names} are known")
        for _, parameters in groups:
            yield from ((p, None) for p in parameters)
        return
    defaults = numbers_of(optimizer.defaults)
    state = optimizer.state
    steps = _steps({p: state[p]["step"] for _, ps in groups for p in ps if p in state and "step" in state[p]}, read)
    for group, parameters in groups:
        numbers = numbers_of(group)
        for p in parameters:
            if _is_plain(p):
                yield p, Case(p, kind, numbers, defaults, state.get(p, {}), steps.get(p, 0.0))
            else:
                yield p, None


def why_lossless(optimizers: Sequence[Optimizer], parameter: torch.Tensor) -> str:
    """Why nothing of this parameter's gradient may be dropped, in words that follow `as`."""
    holders = [(o, g) for o in optimizers for g in o.param_groups if any(p is parameter for p in g["params"])]
    if len(holders) != 1:
        return f"{len(holders)} optimizers train them"
    optimizer, group = holders[0]
    kind = type(optimizer)
    if kind not in KNOWN:
        return f"{kind.__name__} is not an optimizer that gradzip knows"
    if parameter.dtype != torch.float32:
        return f"they are {parameter.dtype}, and grids are defined for float32"
    if _number(group["lr"]) == 0:
        return "the learning rate is 0: near mode begins when it is not"
    return f"no bound on the step is known for the settings of this {kind.__name__}"


def warn_lossless(what: str, why: str) -> None:
    """Says once per `what`, on rank 0, that gradients will be larger than they could be."""
    if what in _warned:
        return
    _warned.add(what)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warn(
            f"gradzip cannot tell which bits of the gradients matter for {what}: {why}. "
            "They travel lossless, so the saving of near and paper mode is lost for them."
        )


def has_sparse_gradient(p: torch.Tensor) -> bool:
    return p.grad is not None and p.grad.layout != torch.strided


def _is_plain(p: torch.Tensor) -> bool:
    """Whether `p` is an ordinary dense float32 tensor, all of it here; warns if not."""
    if p.dtype != torch.float32:
        warn_lossless(f"parameters of {p.dtype}", "grids are defined for float32")
    elif type(p.data) is not torch.Tensor:
        warn_lossless(f"parameters of type {type(p.data).__name__}", "their values are not all on this rank")
    elif p.layout != torch.strided or has_sparse_gradient(p):
        warn_lossless("parameters with sparse gradients", "near and paper mode code dense tensors")
    else:
        return True
    return False


def numbers_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of an optimizer or of one of its groups, as numbers."""
    return {key: _number(value) for key, value in settings.items() if key != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):  # betas
        return tuple(_number(v) for v in value)
    return value


def _steps(found: Mapping[torch.Tensor, Any], read: Read) -> dict[torch.Tensor, float]:
    """Step counts as numbers; torch's optimizers keep them in tensors, fused ones on the device."""
    steps = {p: float(step) for p, step in found.items() if not isinstance(step, torch.Tensor)}
    tensors = {p: step for p, step in found.items() if isinstance(step, torch.Tensor)}
    return steps | dict(zip(tensors, read(list(tensors.values()))))
