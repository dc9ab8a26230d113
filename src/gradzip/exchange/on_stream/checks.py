"""The row of checks: what the stream runner learns of a step, two steps later.

Nothing waits for the host while a step is exchanged. Instead the device notes in one row of numbers whether frames were
what the program expects, and how large they were. The largest numbers of all ranks are found by one all-reduce behind
the last bucket; the host reads them when they have long been there. All ranks read the same and raise the same error.

    row   digest, shapes, results: each with its negative, so that the largest of both tells whether ranks differ
          the norm of each message's means
          of each message of noise: status of 2 W frames, largest frames and notches
          of this rank alone, and not reduced: noise, and how many frames are coarser

Behind it residuals are committed, by a predicate on the device: what a step noted is taken back where a norm is not
finite. The host does the same two steps later, or at once where Memory did not hold it in the same way before.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ...engines.cuda import noise as kernels
from ...engines.cuda.noise_row import ALIKE, OF_FRAMES, OF_RANK, Places, RowCall
from ...engines.cuda.restore import Change, restore
from ...errors import PeerError
from ..outcome import Outcome
from ..program import Program
from .message import Checked
from .slots import OWN, SUM, Largest

_WRONG = (
    "run different programs: use the same model, policy and gradzip on all ranks",
    "have other second moments in their optimizers, so that they round to different grids: load the same optimizer "
    "state on all ranks",
    "have other averaged gradients: this is a bug or a hardware fault",
)
_POISONED = 32


class StepResult(NamedTuple):
    """What came of a step."""

    step: int
    # The largest frames, by the digest of the message's program. Without messages whose means are all zero or not
    # finite: their frames are small, and slots that follow them would be too small for the next ones.
    sizes: dict[str, dict[str, Largest]]
    outcome: Outcome  # of the messages that were rounded


class _Told(NamedTuple):
    """A message, and where its numbers are in the row. Without its buffers: the next message may need their memory."""

    program: Program
    share: float
    has_frames: bool  # that can be wrong
    places: Places


class _Layout:
    """The row of a step's messages, in device memory."""

    def __init__(self, messages: Sequence[Checked], world: int, device: torch.device) -> None:
        self._messages = [weakref.ref(message) for message in messages]
        checked = [message.noise_kernels for message in messages if message.noise_kernels is not None]
        per_message, first = 2 * world + OF_FRAMES, 2 * ALIKE + len(messages)
        reduced = first + per_message * len(checked)
        self.told: list[_Told] = []
        before = 0
        for number, message in enumerate(messages):
            places = Places(2 * ALIKE + number, first + per_message * before, reduced + OF_RANK * before)
            has_frames = message.noise_kernels is not None
            self.told.append(_Told(message.program, message.share, has_frames, places))
            before += has_frames
        self.row = torch.zeros(reduced + OF_RANK * len(checked), dtype=torch.int64, device=device)
        self.reduced = self.row[:reduced]
        self._alike, self.norms = self.row[: 2 * ALIKE].view(-1, 2), self.row[2 * ALIKE : first].view(torch.float64)
        others = [number for number, each in enumerate(self.told) if not each.has_frames]
        self._others = torch.tensor(others, device=device)
        self._call = RowCall(self.row, checked, [t.places for t in self.told if t.has_frames]) if checked else None

    def is_of(self, messages: Sequence[Checked]) -> bool:
        return len(messages) == len(self._messages) and all(a() is b for a, b in zip(self._messages, messages))

    def fill(
        self, digest: int, norms: Sequence[torch.Tensor], shapes: torch.Tensor | None, results: torch.Tensor | None
    ) -> None:
        """`norms` are those of the messages without `noise_kernels`."""
        if self._call is not None:
            self._call(digest, shapes, results)
        else:
            for number, found in enumerate((digest, shapes, results)):
                if found is not None:  # an assignment would copy from pageable memory, and the host would wait
                    self._alike[number, 0].fill_(found)
            torch.neg(self._alike[:, 0], out=self._alike[:, 1])
        if norms:  # a number that is not finite has the largest bits, as an integer
            self.norms.index_copy_(0, self._others, torch.stack(list(norms)).abs_())


class _Sent(NamedTuple):
    step: int
    layout: _Layout
    bytes_sent: list[int]  # by each message; slots may have changed since the layout was made
    numbers: torch.Tensor  # in pinned memory
    copied: Any  # an event


class Checks:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._world = dist.get_world_size(group)
        self._module = torch.get_device_module(device)
        self._sent: deque[_Sent] = deque()
        self._free: list[tuple[torch.Tensor, Any]] = []  # pinned memory, and events
        self._layout: _Layout | None = None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp, self._options.asyncOp = dist.ReduceOp(dist.ReduceOp.MAX), True

    def send(
        self,
        step: int,
        digest: int,
        messages: Sequence[Checked],
        norms: Sequence[torch.Tensor],
        shapes: torch.Tensor | None,
        results: torch.Tensor | None,
        changes: Sequence[Change] = (),
        then: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Enqueues the row of a step on the current stream; `norms` are those of the messages without `noise_kernels`.

        If a rank has a mean that is not finite, `changes` are taken back. `then` is called with the largest norms.
        """
        if self._layout is None or not self._layout.is_of(messages):
            self._layout = _Layout(messages, self._world, self._device)
        layout = self._layout
        layout.fill(digest, norms, shapes, results)
        self._group.allreduce([layout.reduced], self._options).wait()
        if changes:
            restore(layout.norms, changes)
        if then is not None:
            then(layout.norms)
        pinned, copied = self._pinned(layout.row.numel())
        pinned.copy_(layout.row, non_blocking=True)
        copied.record(self._module.current_stream(self._device))
        bytes_sent = [message.bytes_sent for message in messages]
        self._sent.append(_Sent(step, layout, bytes_sent, pinned, copied))

    def free(self) -> None:
        """Lets go of the pinned memory and of the row, when all has been read."""
        self._free.clear()
        self._layout = None

    @property
    def unread(self) -> bool:
        return bool(self._sent)

    def read(self, last: int | None = None, wait: bool = True) -> list[StepResult]:
        """The rows up to a step, or all; without `wait`, those that are there.

        PeerError: something is wrong, and what came after it is not to be used.
        """
        rows = []
        while self._sent and (last is None or self._sent[0].step <= last) and (wait or self._sent[0].copied.query()):
            sent = self._sent.popleft()
            sent.copied.synchronize()
            numbers = sent.numbers.numpy().copy()
            self._free.append((sent.numbers, sent.copied))
            rows.append(self._parsed(sent, numbers))
        return rows

    def _pinned(self, size: int) -> tuple[torch.Tensor, Any]:
        while self._free:
            found = self._free.pop()
            if found[0].numel() == size:
                return found
        return torch.zeros(size, dtype=torch.int64, pin_memory=self._device.type == "cuda"), self._module.Event()

    def _parsed(self, sent: _Sent, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> StepResult:
        step, layout = sent.step, sent.layout
        world, whole, real = self._world, numbers.tolist(), numbers.view(np.float64).tolist()
        for number, text in enumerate(_WRONG):
            if whole[2 * number] != -whole[2 * number + 1]:
                raise PeerError(f"at step {step} ranks {text}. {_last_good(step)}")
        norms = real[2 * ALIKE : 2 * ALIKE + len(layout.told)]
        sizes, outcome = {}, Outcome(finite=all(norm < np.inf for norm in norms))
        for (program, share, has_frames, places), bytes_sent in zip(layout.told, sent.bytes_sent):
            if not has_frames:
                continue
            norm, frames = real[places.norm], whole[places.frames : places.frames + 2 * world + OF_FRAMES]
            status, (own, own_notch, summed, sum_notch) = frames[: 2 * world], frames[2 * world :]
            if any(status):
                raise self._error(program, step, status)
            if 0 < norm < np.inf:
                sizes[program.digest] = {OWN: Largest(own, own_notch), SUM: Largest(summed, sum_notch)}
            outcome.squares += norm**2
            outcome.allowed += share * norm**2
            outcome.values += sum(program.sizes)
            outcome.bytes_sent += bytes_sent
            outcome.noise += real[places.own]
            outcome.coarser += whole[places.own + 1]
        return StepResult(step, sizes, outcome)

    def _error(self, program: Program, step: int, status: Sequence[int]) -> PeerError:
        # A sum is poisoned by the frame that was wrong, so that this one comes first.
        place = next((i for i, bits in enumerate(status) if bits & ~_POISONED), status.index(max(status)))
        said = [text for bit, text in kernels.WRONG.items() if status[place] & bit]
        said = said or ["it says that a frame it was made of was wrong, or fitted its slot at no level"]
        what = "sent a frame" if place < self._world else "sent a sum"
        more = f" and {len(program.names) - 1} more" if len(program.names) > 1 else ""
        return PeerError(
            f"at step {step} rank {place % self._world} {what} of {program.names[0]!r}{more} ({program.codec}) that is "
            f"not what was expected: {', '.join(said)}. {_last_good(step)}"
        )


def _last_good(step: int) -> str:
    if not step:
        return "No step before it was good: start again"
    return f"Gradients since then are not to be used; the last good step is {step - 1}: go on from a checkpoint"
