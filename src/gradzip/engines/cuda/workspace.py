"""Scratch memory of a thread on a stream, and what its kernels tell the host."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

MOST_TENSORS = 16  # per launch
MOST_SMALL = 8192  # blocks that a small launch may have
_EPOCHS = 1 << 22  # launches that kernels, and the host, tell apart


class Prepared(Protocol):
    """A batch of tensors that is ready to be coded, any number of times."""

    all_or_nothing: bool  # whether a decoder leaves all bodies alone where one of them has another coding

    def run(self) -> None: ...

    def finish(self) -> tuple[list[int], int]:
        """Waits; the sizes of the encoded bodies, and the status word, which is cleared."""
        ...


class Workspace:
    """Scratch memory of one thread on one stream, kept between calls and grown as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.prepared: dict[tuple[object, ...], Prepared] = {}  # by what their arguments are made of
        self._memory = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        # Kernels write sizes, and decoders their status, straight into host memory; each with the number of the launch.
        self._told = torch.zeros(MOST_TENSORS + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.told = (ctypes.c_int64 * (MOST_TENSORS + 1)).from_address(self._told.data_ptr())
        self._rows_of_told = list[torch.Tensor]()  # the same for further launches that are under way at once
        self.addresses = self._ticket.data_ptr(), self.status.data_ptr(), self._told.data_ptr()
        # What kernels for small messages leave behind, so that nothing need be cleared: they tell launches by number.
        self._counters = torch.zeros(4, dtype=torch.int32, device=device)
        self._progress = torch.zeros(MOST_SMALL, dtype=torch.int64, device=device)
        self.small_addresses = self._progress.data_ptr(), self._counters.data_ptr()
        self.epoch = 0
        self.served = [0, 0]  # tickets, by decoders and by encoders

    def row_of_told(self, number: int) -> int:
        """The address of what a launch tells, where so many others came before it that nobody has waited for."""
        while len(self._rows_of_told) <= number:
            self._rows_of_told.append(torch.zeros_like(self._told, pin_memory=self._told.is_pinned()))
        return self._rows_of_told[number].data_ptr()

    def words(self, number: int, count: int) -> npt.NDArray[np.int64]:
        """What is there now."""
        return self._rows_of_told[number].numpy()[:count]

    def make_room(self, launches: int) -> None:
        """Sees to it that the numbers of so many launches follow each other."""
        if self.epoch + launches >= _EPOCHS - 1:
            self.epoch = _EPOCHS - 1

    def next_epoch(self) -> int:
        """The number of a launch."""
        self.epoch += 1
        if self.epoch >= _EPOCHS:
            self._progress.zero_()
            self._told.zero_()
            for row in self._rows_of_told:
                row.zero_()
            self.epoch = 1
        return self.epoch

    def memory(self, size: int) -> int:
        """The address of at least `size` bytes."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
            self.prepared.clear()  # they know the old address
        return self._memory.data_ptr()
