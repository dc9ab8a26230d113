"""Where optimizers keep second moments: by the keys of their state, so that it does not matter whose class they are.

| optimizer | key | second moment of value (i, j) of a matrix |
|---|---|---|
| Adam's family, RMSprop, Adagrad | exp_avg_sq, square_avg, sum | that value's |
| Adafactor of torch, of transformers | row_var and col_var, exp_avg_sq_row and exp_avg_sq_col | row i times column j |
| Shampoo | precond_0, precond_1, ... | the root of the product of diagonal values i and j |
| Lion | exp_avg, and no second moment | the norm of row i times that of column j |
| Muon | momentum_buffer; ns_steps or use_muon among its settings | as Lion |

Only ratios within a tensor count, so factors are taken relative to their largest value. Shampoo multiplies a matrix by
the inverse fourth root of a factor on either side, so that value (i, j) is divided by the fourth root of the product of
both: its square is what the table has. Muon does the same with the momentum's own rows and columns, and Lion keeps
nothing else. Any other momentum is taken for plain SGD's, which divides by nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .near import memory_order

_SECOND = ("exp_avg_sq", "square_avg", "sum", "variance")  # the last: vectors of torch's Adafactor
_FACTORS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))
_PRECONDITIONER = "precond_"
_ORTHOGONAL = ("ns_steps", "use_muon")  # settings of optimizers that make the momentum of a matrix orthogonal
_AT_ONCE = 1 << 17  # values: their squares stay in the cache


class Moment(NamedTuple):
    """A second moment in the state of one parameter."""

    keys: tuple[str, ...]
    kind: str  # second, factors, preconditioners or momentum
    counts: bool  # it says enough after some updates, and the state counts them

    @property
    def is_stored(self) -> bool:
        """The state has it value by value."""
        return self.kind == "second"


def find(state: Mapping[str, Any], optimizer: Optimizer, parameter: torch.Tensor) -> Moment | None:
    """What the state of a parameter has; None: nothing that tells its values apart."""
    tensors = {key for key, value in state.items() if isinstance(value, torch.Tensor)}
    for key in _SECOND:
        if key in tensors:
            return Moment((key,), "second", counts=True)
    if parameter.dim() < 2:
        return None
    for pair in _FACTORS:
        if tensors.issuperset(pair):
            return Moment(pair, "factors", counts=True)
    factors = tuple(f"{_PRECONDITIONER}{dimension}" for dimension in range(parameter.dim()))
    if tensors.issuperset(factors):
        return Moment(factors, "preconditioners", counts=True)
    if "exp_avg" in tensors:
        return Moment(("exp_avg",), "momentum", counts=False)
    if "momentum_buffer" in tensors and any(group.get(key) for group in optimizer.param_groups for key in _ORTHOGONAL):
        return Moment(("momentum_buffer",), "momentum", counts=False)
    return None


def values_of(moment: Moment, state: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor | None:
    """The second moments of a parameter, flat, in float32 and in the order of memory; None: they do not fit it."""
    held = [state[key] for key in moment.keys]
    if not all(tensor.is_floating_point() for tensor in held):
        return None
    if moment.kind == "second":
        found: torch.Tensor | None = held[0].float()
    elif moment.kind == "factors":
        found = _product(held[0], held[1], parameter.shape)
    elif moment.kind == "preconditioners":
        found = _of_preconditioners(held, parameter.shape)
    else:
        found = _of_momentum(held[0], parameter.shape)
    if found is None or found.shape != parameter.shape:
        return None
    return found.permute(memory_order(parameter)).reshape(-1)


def _product(rows: torch.Tensor, columns: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The second moments that Adafactor's factors stand for."""
    if rows.dim() < len(shape):  # those of transformers have one dimension less
        rows, columns = rows.unsqueeze(-1), columns.unsqueeze(-2)
    return _relative(rows) * _relative(columns)


def _of_preconditioners(factors: list[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    """Of Shampoo: the product of the diagonals, to the power of 1 over their number."""
    if any(factor.shape != (size, size) for factor, size in zip(factors, shape)):
        return None
    found = torch.ones((), device=factors[0].device)
    for dimension, factor in enumerate(factors):
        diagonal = _relative(factor.diagonal().double().pow(1 / len(shape)))
        found = found * diagonal.view([-1 if other == dimension else 1 for other in range(len(shape))])
    return found


def _of_momentum(momentum: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """The norms of rows times those of columns; a row is all that has one first index."""
    if momentum.shape != shape or not momentum.numel():
        return None
    rows, columns = _norms(momentum.detach().reshape(shape[0], -1))
    return (_relative(rows)[:, None] * _relative(columns)).view(shape)


def _norms(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows and of columns, in float64: ranks whose processors add in another order have the same exponents."""
    if matrix.device.type == "cuda":
        rows, columns = (torch.linalg.vector_norm(matrix, dim=side, dtype=torch.float64) for side in (1, 0))
        return rows, columns
    rows = torch.empty(len(matrix), dtype=torch.float64)
    columns = torch.zeros(matrix.shape[1], dtype=torch.float64)
    several = max(1, _AT_ONCE // matrix.shape[1])
    for start in range(0, len(matrix), several):
        squares = matrix[start : start + several].double().square_()
        rows[start : start + several] = squares.sum(1)
        columns += squares.sum(0)
    return rows.sqrt_(), columns.sqrt_()


def _relative(factor: torch.Tensor) -> torch.Tensor:
    """To the largest, in float32: products of factors as they are could vanish or overflow."""
    factor = factor.double()
    return (factor / factor.amax()).float()
