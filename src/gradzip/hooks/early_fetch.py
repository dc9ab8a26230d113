"""Numbers that live on a GPU, brought to the host before backward asks for them.

Fused optimizers count their steps on the device, and a GradScaler keeps its scale there. Reading one makes the host
wait for all that the device still has to do, and in backward that is a forward pass. So a copy is started when forward
begins: when the first bucket comes, the device is long past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..sensitivity.survey import fetch


class EarlyFetch:
    """`wanted` names the numbers; whatever has been written to since the copy was started is read again."""

    def __init__(self, model: DistributedDataParallel, wanted: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._wanted = wanted
        self._known: dict[torch.Tensor, tuple[int, int]] = {}  # version and place in the copy
        self._copy = torch.empty(0)
        self._copied: torch.cuda.Event | None = None
        self._hook = model.register_forward_pre_hook(self._start)

    def remove(self) -> None:
        self._hook.remove()

    def _start(self, *_: Any) -> None:
        if torch.compiler.is_compiling():  # torch.compile(ddp) would trace what follows: numbers are read when needed
            return
        numbers = [number for number in self._wanted() if number.device.type == "cuda"]
        self._known = {number: (number._version, place) for place, number in enumerate(numbers)}
        if not numbers:
            return
        with torch.no_grad():
            together = torch.stack([number.detach().reshape(()) for number in numbers])
            self._copy = torch.empty(len(numbers), dtype=together.dtype, pin_memory=True)
            self._copy.copy_(together, non_blocking=True)
        self._copied = torch.cuda.current_stream(together.device).record_event()

    def read(self, numbers: Sequence[torch.Tensor]) -> list[float]:
        """As `fetch` does, without waiting for the device where a copy is here."""
        places = []
        for number in numbers:
            version, place = self._known.get(number, (-1, -1))
            if version != number._version:
                return fetch(numbers)
            places.append(place)
        if self._copied is not None:
            self._copied.synchronize()
        values = self._copy.tolist()
        return [float(values[place]) for place in places]
