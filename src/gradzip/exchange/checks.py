"""The row of checks: what the stream runner learns of a step, two steps later.

Nothing waits for the host while a step is exchanged. Instead the device notes in one row of numbers whether frames were
what the program expects, and how large they were. The largest numbers of all ranks are found by one all-reduce behind
the last bucket; the host reads them when they have long been there. All ranks read the same and raise the same error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..collectives.message import Outcome
from ..engines.cuda import noise as kernels
from ..errors import PeerError
from .on_device import DeviceMessage, Frames
from .program import Program
from .slots import OWN, SUM

_PAIRS = ("programs", "shapes", "results")  # numbers that all ranks must have alike: each comes with its negative
_WRONG = {
    "programs": "run different programs: use the same model, policy and gradzip on all ranks",
    "shapes": "have other second moments in their optimizers, so that they round to different grids",
    "results": "have other averaged gradients: this is a bug or a hardware fault",
}
_POISONED = 32


class Row(NamedTuple):
    """What came of a step."""

    step: int
    # The largest frames, by the digest of the message's program. Without messages whose means are all zero or not
    # finite: their frames are small, and slots that follow them would be too small for the next ones.
    sizes: dict[str, dict[str, int]]
    outcome: Outcome  # of the messages that were rounded


class _Sent(NamedTuple):
    step: int
    messages: list[tuple[Program, Frames | None]]
    numbers: torch.Tensor  # in pinned memory
    copied: Any  # an event


class Checks:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._world = dist.get_world_size(group)
        self._module = torch.get_device_module(device)
        self._sent: deque[_Sent] = deque()
        self._free: list[torch.Tensor] = []  # pinned memory
        self._digest: tuple[int, torch.Tensor] = 0, torch.zeros(2, dtype=torch.int64, device=device)

    def send(
        self,
        step: int,
        digest: int,
        messages: Sequence[DeviceMessage],
        norms: Sequence[torch.Tensor],
        shapes: torch.Tensor | None,
        results: torch.Tensor | None,
    ) -> None:
        """Enqueues the row of a step on the current stream."""
        if self._digest[0] != digest:
            self._digest = digest, torch.tensor([digest, -digest], device=self._device)
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        pairs = [zero if number is None else number for number in (shapes, results)]
        found = [(message.program, message.frames()) for message in messages]
        frames = [each for _, each in found if each is not None]
        # A number that is not finite has the largest bits, as an integer.
        largest = [self._digest[1], torch.stack([sign for x in pairs for sign in (x, -x)])]
        largest.append(torch.stack(list(norms)).abs_().view(torch.int64))
        for each in frames:
            largest += [each.status.long(), each.own_bytes, each.sum_bytes]
        row = torch.cat(largest)
        dist.all_reduce(row, dist.ReduceOp.MAX, group=self._group, async_op=True).wait()
        own = [torch.stack([each.noise for each in frames]).view(torch.int64)] if frames else []
        numbers = torch.cat([row, *own, *(notch.long() for each in frames for notch in each.notches)])
        pinned = self._pinned(numbers.numel())
        pinned.copy_(numbers, non_blocking=True)
        copied = self._module.Event()
        copied.record(self._module.current_stream())
        self._sent.append(_Sent(step, found, pinned, copied))

    def read(self, last: int | None = None) -> list[Row]:
        """The rows up to a step, or all. PeerError: something is wrong, and what came after it is not to be used."""
        rows = []
        while self._sent and (last is None or self._sent[0].step <= last):
            sent = self._sent.popleft()
            sent.copied.synchronize()
            numbers = sent.numbers.numpy().copy()
            self._free.append(sent.numbers)
            rows.append(self._parsed(sent, numbers))
        return rows

    def _pinned(self, size: int) -> torch.Tensor:
        self._free = [memory for memory in self._free if memory.numel() == size]
        if self._free:
            return self._free.pop()
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def _parsed(self, sent: _Sent, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> Row:
        world, frames = self._world, [each for each in sent.messages if each[1] is not None]
        pairs, rest = numbers[: 2 * len(_PAIRS)].reshape(-1, 2), numbers[2 * len(_PAIRS) :]
        norms, rest = rest[: len(sent.messages)].view(np.float64), rest[len(sent.messages) :]
        of_frames, rest = (
            rest[: 3 * world * len(frames)].reshape(len(frames), 3 * world),
            rest[3 * world * len(frames) :],
        )
        noise, notches = rest[: len(frames)].view(np.float64), rest[len(frames) :]
        for what, (most, least) in zip(_PAIRS, pairs.tolist()):
            if most != -least:
                raise PeerError(f"at step {sent.step} ranks {_WRONG[what]}. {_last_good(sent.step)}")
        sizes, outcome = {}, Outcome(finite=bool(np.isfinite(norms).all()))
        numbered = [number for number, (_, each) in enumerate(sent.messages) if each is not None]
        for number, row in zip(numbered, of_frames):
            program, each = sent.messages[number]
            assert each is not None
            self._check(program, sent.step, row[: 2 * world])
            if 0 < norms[number] < np.inf:
                sizes[program.digest] = {OWN: int(row[2 * world : -1].max(initial=0)), SUM: int(row[-1])}
            squares = float(norms[number]) ** 2
            outcome.squares += squares
            outcome.allowed += each.share * squares
            outcome.values += sum(program.sizes)
            outcome.bytes_sent += each.bytes_sent
        outcome.noise, outcome.coarser = float(noise.sum()), int((notches > 0).sum())
        return Row(sent.step, sizes, outcome)

    def _check(self, program: Program, step: int, status: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        if not status.any():
            return
        # A sum is poisoned by the frame that was wrong, so that this one comes first.
        place = next((i for i, bits in enumerate(status) if bits & ~_POISONED), int(status.argmax()))
        said = [text for bit, text in kernels.WRONG.items() if int(status[place]) & bit] or ["it was poisoned"]
        what = "sent a frame" if place < self._world else "sent a sum"
        raise PeerError(
            f"at step {step} rank {place % self._world} {what} of {program.names[0]!r} and {len(program.names) - 1} "
            f"more ({program.codec}) that is not what was expected: {', '.join(said)}. {_last_good(step)}"
        )


def _last_good(step: int) -> str:
    before = f"the last good step is {step - 1}" if step else "no step before it was good"
    return f"Gradients since then are not to be used; {before}: go on from a checkpoint"
