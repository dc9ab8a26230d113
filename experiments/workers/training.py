"""Gradients of W workers on one device, as DDP's ranks would compute them, and learning rates.

Batch norm normalises each worker's batch by itself; running statistics are those of worker 0, whose buffers DDP hands
to all others before each forward pass (`broadcast_buffers`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
LossOf = Callable[..., torch.Tensor]  # of the tensors of a batch


class WorkerGradients:
    """Computes each worker's gradients in turn and puts them into its row.

    On a GPU forward and backward are captured once and replayed (`graph=True`): a model of many small kernels is
    otherwise bound by Python. All batches must have the same shapes then.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf, rows: Sequence[Sequence[torch.Tensor]], graph: bool) -> None:
        self._parameters, self._rows, self._loss_of = list(model.parameters()), rows, loss_of
        self._buffers = list(model.buffers())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wants_graph = graph
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._loss = torch.zeros(())

    def __call__(self, batches: Iterable[Batch]) -> torch.Tensor:
        """The mean loss of all workers, still on the device."""
        total, kept, worker = None, list[torch.Tensor](), -1
        for worker, batch in enumerate(batches):
            loss, gradients = self._graphed(batch) if self._wants_graph else self._plainly(batch)
            torch._foreach_copy_(list(self._rows[worker]), gradients)
            total = loss.detach().clone() if total is None else total + loss.detach()
            if worker == 0:
                kept = [buffer.clone() for buffer in self._buffers]
        if worker + 1 != len(self._rows) or total is None:
            raise ValueError(f"{worker + 1} batches for {len(self._rows)} workers")
        for buffer, before in zip(self._buffers, kept):
            buffer.copy_(before)
        return total / len(self._rows)

    def _plainly(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self._loss_of(*batch)
        return loss, list(torch.autograd.grad(loss, self._parameters))

    def _graphed(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if self._graph is None:
            self._capture(batch)
        assert self._graph is not None
        torch._foreach_copy_(self._inputs, list(batch))
        self._graph.replay()
        return self._loss, self._outputs

    def _capture(self, batch: Batch) -> None:
        self._inputs = [part.clone() for part in batch]
        before = [buffer.clone() for buffer in self._buffers]
        random = torch.cuda.get_rng_state()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries choose their kernels and take their workspace
            for _ in range(3):
                self._plainly(tuple(self._inputs))
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.set_rng_state(random)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            loss, self._outputs = self._plainly(tuple(self._inputs))
            self._loss = loss.detach()
        for buffer, value in zip(self._buffers, before):
            buffer.copy_(value)


def stepped_rate(peak: float, epoch: float, warm: float, drops: Sequence[float], start: float = 0.0) -> float:
    """The papers' schedule: linear from `start` to `peak` within `warm` epochs, a tenth of it after each drop."""
    if epoch < warm:
        return start + (peak - start) * epoch / warm
    return peak * float(0.1 ** bisect.bisect_right(list(drops), epoch + 1e-9))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def shares(order: torch.Tensor, world: int, batch: int) -> torch.Tensor:
    """(steps, world, batch) indices: in each step every worker has a batch of its own; the rest of `order` is left."""
    steps = order.numel() // (world * batch)
    return order[: steps * world * batch].view(steps, world, batch)
