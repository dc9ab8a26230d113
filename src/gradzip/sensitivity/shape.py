"""Shapes: how coarse each value of a gradient may be beside the others of its tensor, from the optimizer's state.

An optimizer that divides by the root of a second moment feels the same error more where that is small. So the grid of
the codec `noise` follows it: value i of a tensor is rounded to multiples of its level times 2^d, where d is half the
exponent of the second moment, less that of the largest one; at least -12. All ranks hold the same state, so nobody has
to send it. moments.py says where it comes from; docs/format.md, "Noise", has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from .. import engines
from ..engines.cuda import noise as kernels
from . import moments
from .moments import Moment
from .survey import States, fetch

FIRST_STEP = 4  # updates after which second moments say enough
DEEPEST = -12
_INFINITY = 0x7F800000  # as the bits of a float32
AT_ONCE = 1 << 17  # values: what is made of them on the way stays in the cache
_SAMPLED = 64  # values of each tensor that ranks compare in a step, others in the next


class _Kept(NamedTuple):
    """A second moment that is read in each step, and where the optimizer keeps it."""

    parameter: torch.Tensor
    name: str
    state: Mapping[str, Any]
    key: str
    second: torch.Tensor  # what was found under that key
    address: int  # of that
    copy: torch.Tensor | None  # in float32 and in the order of memory, where the optimizer has it otherwise

    def is_there(self) -> bool:
        if self.copy is not None:
            return self.key in self.state
        return self.state.get(self.key) is self.second and self.second.data_ptr() == self.address


class _Waiting(NamedTuple):
    """A parameter with too few updates for a shape, and what tells that there were more since."""

    parameter: torch.Tensor
    steps: Any  # the count in the optimizer's state
    version: int  # of that count, where it is on a GPU: reading it would make the host wait

    def may_be_over(self, state: Mapping[str, Any] | None) -> bool:
        steps = None if state is None else state.get("step")
        if _is_on_gpu(steps):
            return steps is not self.steps or steps._version != self.version
        return steps is not None and float(steps) >= FIRST_STEP


class SecondMoments:
    """The shapes of a model's gradients, renewed once a step; all in one tensor, which stays where it is."""

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], on_stream: bool = False
    ) -> None:
        """`on_stream`: kernels on the current stream make the shapes, and the host waits for none of them.

        They are the same, but for second moments that are not fit: their shape is all zero, which codes like none.
        """
        # A ZeroRedundancyOptimizer has the state of this rank's share alone.
        self._optimizers = [each for each in optimizers if type(each).__name__ != "ZeroRedundancyOptimizer"]
        self._names = names
        self._flat = torch.empty(0, dtype=torch.int8)
        self._scratch: torch.Tensor | None = None
        self._places: dict[str, torch.Tensor] = {}  # views of it, by name
        self._sampled: _Sampled | None = None  # what ranks compare of it
        self._moments: dict[str, Moment] = {}  # where they come from
        self._settled: dict[str, torch.Tensor] = {}  # second moments that have seen enough steps
        self._shapes: dict[str, torch.Tensor] = {}
        self._shaped = self._shapes, torch.zeros(len(names), dtype=torch.bool)  # which of all gradients are in there
        self._on_stream = on_stream
        self._kept: list[_Kept] = []  # what the shaper was made for
        self._shaper: _Shaper | None = None
        self._fit: list[bool] | None = None  # of those, whether each gives a shape, where the host knows
        self._is_new = True  # there was never a shaper
        self._waiting: list[_Waiting] = []  # those whose second moments have not seen enough steps
        self._states: list[States] = []  # what optimizers kept when it was made
        self._counted: dict[torch.Tensor, float] = {}  # steps that are counted on a GPU

    def renew(self) -> bool:
        """Takes the state as it is now; True if other tensors have a shape than before.

        What finds second moments takes microseconds a tensor: it is done again only when the state has moved.
        """
        before = self._shapes
        if self._is_new or self._has_moved():
            self._prepare()
        for kept in self._kept:
            if kept.copy is not None:
                second = self._second(kept.parameter, kept.name)
                if second is not None:
                    kept.copy.copy_(second)
        fit = None if self._shaper is None else self._shaper.run()
        if fit is not None and fit != self._fit:
            self._fit = fit
            self._shapes = {kept.name: self._places[kept.name] for kept, fits in zip(self._kept, fit) if fits}
        return self._shapes.keys() != before.keys()

    def _has_moved(self) -> bool:
        """Whether other second moments count than those which the shaper was made for."""
        if any(states.have_changed() for states in self._states):  # load_state_dict makes new ones
            return True
        if any(waiting.may_be_over(self._state(waiting.parameter)) for waiting in self._waiting):
            return True
        return not all(kept.is_there() for kept in self._kept)

    def _prepare(self) -> None:
        """Finds the second moments that have seen enough steps, and makes a shaper for them."""
        self._states = [States.of(optimizer) for optimizer in self._optimizers]
        counts = [state["step"] for p in self._names if (state := self._state(p)) and _is_on_gpu(state.get("step"))]
        self._counted = dict(zip(counts, fetch(counts)))  # with one transfer
        self._kept, self._shapes, self._shaper, self._is_new, self._waiting = [], {}, None, False, []
        self._fit = None
        seconds = []
        for parameter, name in self._names.items():
            second, state = self._second(parameter, name), self._state(parameter)
            if second is None or state is None or not second.numel():
                continue
            key = self._moments[name].keys[0]
            second = second.contiguous()
            held: torch.Tensor = state[key]
            copy = None if second.data_ptr() == held.data_ptr() else second  # of 16 bits, or made of factors
            self._kept.append(_Kept(parameter, name, state, key, held, held.data_ptr(), copy))
            seconds.append(second)
            self._shapes[name] = self._place(name, parameter.numel())
        if seconds:
            places = [self._places[kept.name] for kept in self._kept]
            self._shaper = self._shaper_of(seconds, places)

    def _shaper_of(self, seconds: list[torch.Tensor], places: list[torch.Tensor]) -> _Shaper:
        if self._on_stream:
            return kernels.Shaper(seconds, places)
        if seconds[0].device.type == "cpu":
            shaper: _Shaper = engines.noise("cpu").Shaper(seconds, places)
            return shaper
        return _OneByOne(seconds, places, self._scratch)

    def free(self) -> None:
        """Lets go of all shapes; they are made again where they are asked for."""
        self._flat, self._scratch, self._sampled, self._shaper = torch.empty(0, dtype=torch.int8), None, None, None
        self._places, self._moments, self._settled, self._shapes, self._counted = {}, {}, {}, {}, {}
        self._kept, self._waiting, self._states, self._is_new = [], [], [], True

    def of(self, names: Sequence[str]) -> list[torch.Tensor | None]:
        """The shapes of some gradients; None: all values of that one alike."""
        return [self._shapes.get(name) for name in names]

    def total(self) -> torch.Tensor:
        """The sum of all shapes, on their device: ranks have the same."""
        return self._flat.sum(dtype=torch.int64)

    @property
    def names(self) -> list[str]:
        """Those that have one."""
        return list(self._shapes)

    @property
    def all_names(self) -> list[str]:
        """Of all gradients, those without a shape included."""
        return list(self._names.values())

    def sums(self, step: int) -> torch.Tensor:
        """A number for each gradient, of a sample of its shape: what ranks compare. No shape has a sum above 0."""
        if not self._places:
            return torch.ones(len(self._names), dtype=torch.int64)
        if self._sampled is None:
            self._sampled = _Sampled.of([place.numel() for place in self._places.values()])
        shapes = self._shapes
        if self._shaped[0] is not shapes:
            self._shaped = shapes, torch.tensor([name in shapes for name in self._names.values()])
        return torch.where(self._shaped[1], self._sampled.sums(self._flat, step), 1)

    def _second(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """The second moment of a parameter, flat, in float32 and in the order of memory; None: there is none yet."""
        held = self._holder(parameter)
        if held is None:
            return None
        optimizer, state = held
        moment = moments.find(state, optimizer, parameter)
        if moment is None or (moment.counts and not self._has_settled(parameter, name, state[moment.keys[0]], state)):
            return None
        self._moments[name] = moment
        return moments.values_of(moment, state, parameter)

    def _holder(self, parameter: torch.Tensor) -> tuple[Optimizer, dict[str, Any]] | None:
        """The optimizer that steps a parameter, with its state; None: none has done so yet."""
        for optimizer in self._optimizers:
            if state := optimizer.state.get(parameter):
                return optimizer, state
        return None

    def _state(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        held = self._holder(parameter)
        return None if held is None else held[1]

    def _has_settled(self, parameter: torch.Tensor, name: str, second: torch.Tensor, state: Mapping[str, Any]) -> bool:
        if self._settled.get(name) is not second:
            steps = state.get("step")
            if steps is None:
                return False
            known = isinstance(steps, torch.Tensor) and steps in self._counted
            if (self._counted[steps] if known else float(steps)) < FIRST_STEP:
                self._waiting.append(_Waiting(parameter, steps, steps._version if _is_on_gpu(steps) else 0))
                return False
            self._settled[name] = second
        return True

    def _place(self, name: str, numel: int) -> torch.Tensor:
        if not self._places:
            device = next(iter(self._names)).device
            self._flat = torch.zeros(sum(p.numel() for p in self._names), dtype=torch.int8, device=device)
            self._scratch = torch.empty(AT_ONCE, dtype=torch.int32, device=device)
            sizes = [p.numel() for p in self._names]
            self._places = dict(zip(self._names.values(), self._flat.split_with_sizes(sizes)))
        return self._places[name]


class _Shaper(Protocol):
    def run(self) -> list[bool] | None:
        """Makes the shapes; whether each second moment is fit for one, if the host knows."""
        ...


class _OneByOne:
    """Shapes of tensors on any device."""

    def __init__(self, seconds: list[torch.Tensor], shapes: list[torch.Tensor], scratch: torch.Tensor | None) -> None:
        self._pairs, self._scratch = list(zip(seconds, shapes)), scratch

    def run(self) -> list[bool]:
        return [shape_of(second, shape, self._scratch) is not None for second, shape in self._pairs]


def shape_of(
    second: torch.Tensor, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The shape of flat float32 second moments, written to `out`; None where they are not finite, or all zero.

    `scratch` is room for some int32: fresh memory would cost more than the work itself.
    """
    out = torch.empty(second.numel(), dtype=torch.int8, device=second.device) if out is None else out
    scratch = torch.empty(AT_ONCE, dtype=torch.int32, device=second.device) if scratch is None else scratch
    if not second.numel():
        return None
    bits = second.contiguous().view(torch.int32)  # ordered like the values themselves, where these are not negative
    least, most = (int(end) for end in bits.aminmax())
    if least < 0 or most == 0 or most >= _INFINITY:
        return None
    for start in range(0, bits.numel(), AT_ONCE):
        part = bits[start : start + AT_ONCE]
        halves = torch.bitwise_right_shift(part, 24, out=scratch[: part.numel()])  # upper 7 bits of the exponent
        out[start : start + AT_ONCE] = halves
    return out.sub_(most >> 24).clamp_(min=DEEPEST)


def _is_on_gpu(count: object) -> bool:
    return isinstance(count, torch.Tensor) and count.device.type == "cuda"


class _Sampled(NamedTuple):
    """Every n-th value of tensors that lie one behind the other, from elsewhere in each step."""

    first: torch.Tensor  # places of each tensor's values in the first step
    weights: torch.Tensor  # of those values, 0 where a tensor has fewer
    room: torch.Tensor  # how far they may be moved

    @classmethod
    def of(cls, sizes: Sequence[int]) -> _Sampled:
        size, number = torch.tensor(sizes)[:, None], torch.arange(_SAMPLED)
        count = size.clamp(1, _SAMPLED)
        stride = size // count
        index = size.cumsum(0) - size + stride * number.clamp(max=count - 1)
        weights = (number + 1) * (number < count) * (size > 0)
        return cls(index.clamp(max=sum(sizes) - 1), weights, (size - (count - 1) * stride).clamp(min=1))

    def sums(self, flat: torch.Tensor, step: int) -> torch.Tensor:
        places = (self.first + step % self.room).clamp(max=flat.numel() - 1)
        return (flat[places] * self.weights).sum(1)
