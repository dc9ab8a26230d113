"""What gcomp's near and paper modes make of the gradients of a paired run, for all tensors at once.

A stack is one of noise.Layout. Each rank's own gradients are rounded, an owner's as well, they are added up in the
order of ranks, and what is sent back is rounded again: in near mode the sum, on a grid coarser by floor(log2 W), in
paper mode the mean. Vectors and tiny tensors are not compressed, as by attach(model, optimizer, "gcomp"). The
arithmetic is that of rounding.py; tests/test_gcomp_workers.py compares the result with decoded frames, bit for bit.
"""

from __future__ import annotations

import torch

from gradzip.codecs import Context, parse
from gradzip.codecs.gcomp import GComp
from gradzip.codecs.local_lossless import looks_at
from gradzip.policy import as_policy

from . import rounding
from .noise import Layout
from .row_optimizer import RowOptimizer

CODECS = {"near": "gcomp", "paper": "gcomp:mode=paper"}
Bits = tuple[torch.Tensor, torch.Tensor]  # per value: of a worker's own gradients, and of sums


class GCompMean:
    """Averages the gradients of one run, step after step."""

    def __init__(self, kind: str, layout: Layout, optimizer: RowOptimizer) -> None:
        codec = parse(CODECS[kind])
        assert isinstance(codec, GComp)
        assert codec.error_memory is None
        self._codec, self._layout, self._optimizer = codec, layout, optimizer
        policy = as_policy(codec)
        options = [policy.option(name, shape) for name, shape in zip(layout.names, layout.shapes)]
        self._coded = [t for t, option in enumerate(options) if parse(option.codec) == codec]
        is_coded = torch.zeros(len(options), dtype=torch.bool, device=layout.device)
        is_coded[self._coded] = True
        self._is_coded = layout.each_value(is_coded)
        self._exact: list[list[bool]] | None = None  # by rank and tensor: own gradients that go lossless
        self._exact_blocks: list[torch.Tensor | None] = []  # the same by rank, for blocks; none where all are rounded

    def __call__(
        self, x: torch.Tensor, true: torch.Tensor, rate: float, step: int, probe: bool = False
    ) -> tuple[torch.Tensor, Bits | None]:
        """The mean (N,) of a stack (W, N) whose true mean is `true`; with `probe` also the bits of real frames."""
        self._optimizer.begin_step(rate, step)
        near, world = self._codec.mode == "near", len(x)
        grid = self._optimizer.floors(self._codec.ulps) if near else self._optimizer.reaches()
        if grid is None:
            return true, None  # nothing may be changed: all of it goes lossless
        if self._exact is None or looks_at(step):
            self._look(x, grid, step)
        total = self._own(x, grid, 0)
        for rank in range(1, world):
            total = total + self._own(x, grid, rank)
        if near:
            shift = world.bit_length() - 1
            mean = rounding.near(total, grid, shift) / world
        else:
            total, shift = total / world, 0
            mean = rounding.paper(total, grid)
        mean = torch.where(self._is_coded, self._in_blocks(mean), self._in_blocks(true)).view(-1)
        return mean, self._bits(x[0], total, grid, step, shift) if probe else None

    def _own(self, x: torch.Tensor, grid: torch.Tensor, rank: int) -> torch.Tensor:
        """What the others have of a rank's gradients."""
        own = x[rank]
        rounded = (rounding.near if self._codec.mode == "near" else rounding.paper)(own, grid)
        exact = self._exact_blocks[rank]
        if exact is None:
            return rounded
        return torch.where(exact, self._in_blocks(own), self._in_blocks(rounded)).view(-1)

    def _in_blocks(self, row: torch.Tensor) -> torch.Tensor:
        return self._layout.in_blocks(row)

    def _look(self, x: torch.Tensor, grid: torch.Tensor, step: int) -> None:
        """Lets each rank find out which of its gradients are smaller lossless. A look is rare, so tensor by tensor."""
        contexts = self._contexts(grid, step)
        self._exact, self._exact_blocks = [], []
        for row in x:
            flat = [view.reshape(-1) for view in self._layout.views(row)]
            exact = [False] * len(flat)
            found = self._codec.own_exact(
                [flat[t] for t in self._coded], [contexts[t] for t in self._coded], [{} for _ in self._coded]
            )
            for t, is_exact in zip(self._coded, found):
                exact[t] = is_exact
            self._exact.append(exact)
            flags = torch.tensor(exact, device=x.device)
            self._exact_blocks.append(self._layout.each_value(flags) if any(exact) else None)

    def _contexts(self, grid: torch.Tensor, step: int, shift: int = 0) -> list[Context]:
        world, floors = self._layout.world, self._layout.views(grid)
        return [
            Context(name, step, world=world, floor=floor.reshape(-1), shift=shift)
            for name, floor in zip(self._layout.names, floors)
        ]

    def _bits(self, own: torch.Tensor, total: torch.Tensor, grid: torch.Tensor, step: int, shift: int) -> Bits:
        """Of the frames of rank 0's gradients and of sums, over the values of the tensors that are coded."""
        assert self._exact is not None
        whole, of_sums = self._contexts(grid, step), self._contexts(grid, step, shift)
        own_bytes, sum_bytes, values = 0, 0, 0
        for t in self._coded:
            mine, summed = (self._layout.views(row)[t].reshape(-1) for row in (own, total))
            codec = self._codec.exact if self._exact[0][t] else self._codec
            own_bytes += codec.encode(mine, whole[t]).numel()
            sum_bytes += self._codec.encode(summed, of_sums[t]).numel()
            values += mine.numel()
        own_bits, sum_bits = (torch.tensor(8 * count / max(values, 1)).double() for count in (own_bytes, sum_bytes))
        return own_bits, sum_bits
