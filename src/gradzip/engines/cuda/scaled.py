"""Block-scaled codes on a GPU, by kernels/scaled.cuh; docs/format.md, "Block-scaled codes", is what they follow.

Tables in device memory describe parts and frames. They are made once for a layout; a launch then serves all of them,
and passes the step's number and nothing else. `code` takes one frame, as reference_scaled does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import noise_layout
from ..scaled_layout import Form, Parts, places
from .launch import StepCall
from .noise import float_name, times_of, to_device

NAME = "cuda"
TILE, WARPS = 256, 4  # as in scaled.cuh
ALIGN = 16  # bytes: frames begin at multiples of it

PART = np.dtype(
    [(name, "<u8") for name in ("values", "key", "signs", "start", "length", "scale_at", "code_at")]
    + [(name, "<u4") for name in ("frame", "padding")]
)
_ARGS = struct.Struct("<5Q4I2f2I")
_STEP_AT = 5 * 8
_NONE = 0xFFFFFFFF


class Work(NamedTuple):
    """What a launch does."""

    kernel: str  # scaled_encode, scaled_reduce or scaled_decode
    parts: npt.NDArray[np.void]
    terms: Sequence[Sequence[int]] = ()  # of each frame: addresses of the frames that are added up
    frames: Sequence[int] = ()  # addresses of those that are written
    own: int = _NONE  # the term that is the rank's own values
    divisor: int = 1
    offset: int = 0  # added to draws
    named: bool = True  # keys are those of names, which the step is mixed into; else they are those of the step


class Launch:
    """One launch for all parts of all frames, with its tables."""

    def __init__(self, device: torch.device, dtype: torch.dtype, form: Form, work: Work) -> None:
        tiles = -(-work.parts["length"].astype(np.int64) // TILE)
        numbered = np.zeros((int(tiles.sum()), 2), np.uint32)
        numbered[:, 0] = np.repeat(np.arange(len(tiles)), tiles)
        numbered[:, 1] = np.arange(len(numbered)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        terms, frames = np.array(work.terms, np.uint64), np.array(work.frames, np.uint64)
        self._kept = [to_device(array, device) for array in (work.parts, numbered, terms, frames)]
        packed = _ARGS.pack(
            *(table.data_ptr() for table in self._kept), len(numbered), 0, work.offset,
            terms.shape[1] if terms.ndim == 2 else 0, work.own, float(work.divisor), times_of(work.divisor),
            work.named, 0,
        )  # fmt: skip
        options = f"{float_name(dtype)}, {form.kind}, {form.block}, {str(form.hadamard).lower()}"
        groups = -(-len(numbered) // WARPS)
        self._call = StepCall(device, f"{work.kernel}<{options}>", groups, 32 * WARPS, packed, _STEP_AT)

    def __call__(self, step: int) -> None:
        self._call(step)


class Layout(NamedTuple):
    """A message: flat tensors in device memory, and the parts that they are dealt out into, in the order of owners."""

    tensors: Sequence[torch.Tensor]
    tensor: npt.NDArray[np.int64]  # of each part
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    names: Sequence[str]
    world: int
    rank: int


class ScaledKernels:
    """The launches and buffers of a message: what one rank does in an exchange by owners of parts.

    encode   a frame for each other owner                                  1 launch
    reduce   all ranks' frames of this rank's parts, added and coded again 1 launch
    decode   the frames of all sums become the means                       1 launch

    `sent` holds a slot for each owner and goes out by an all-to-all; what comes lies in `received`. The sum's frame is
    this rank's slot of `gathered`, which an all-gather fills. Nothing is allocated, and the host does not wait.
    """

    def __init__(self, layout: Layout, form: Form, kept: int | None = None) -> None:
        """`kept`: what sums are divided by in a reduce-scatter, where they stay as they are in place of the values."""
        device, dtype = layout.tensors[0].device, layout.tensors[0].dtype
        world, rank = layout.world, layout.rank
        laid = [places(layout.length[layout.owner == owner].tolist(), form) for owner in range(world)]
        self.slot = slot = max(ALIGN, *(-(-each.size // ALIGN) * ALIGN for each in laid))
        self.sent, self.received, self.gathered = (
            torch.zeros(world * slot, dtype=torch.uint8, device=device) for _ in range(3)
        )
        self.sum_frame = self.gathered[rank * slot : (rank + 1) * slot]
        rows = np.zeros(len(layout.tensor), PART)
        addresses = np.array([tensor.data_ptr() for tensor in layout.tensors], np.uint64)
        start = layout.start.astype(np.uint64)
        rows["values"] = addresses[layout.tensor] + start * np.uint64(dtype.itemsize)
        rows["signs"] = _keys(layout, "signs")
        rows["start"], rows["length"], rows["frame"] = start, layout.length, layout.owner
        for owner, each in enumerate(laid):
            rows["scale_at"][layout.owner == owner] = each.scales
            rows["code_at"][layout.owner == owner] = each.codes
        own, summed = rows.copy(), rows.copy()
        own["key"], summed["key"] = _keys(layout, "own"), _keys(layout, "sum")
        mine = layout.owner == rank
        summed_here = summed[mine]
        summed_here["frame"] = 0
        sent, received, gathered = (
            [buffer.data_ptr() + slot * number for number in range(world)]
            for buffer in (self.sent, self.received, self.gathered)
        )
        offset = noise_layout.offset_of(rank, world)
        self.encode = Launch(device, dtype, form, Work("scaled_encode", own[~mine], frames=sent, offset=offset))
        self.reduce = Launch(
            device, dtype, form,
            Work("scaled_reduce", summed_here, [received], [self.sum_frame.data_ptr()], own=rank),
        )  # fmt: skip
        self.decode = Launch(
            device, dtype, form, Work("scaled_decode", summed, [[frame] for frame in gathered], divisor=world)
        )
        self.keep: Launch | None = None
        if kept is not None:
            work = Work("scaled_decode", summed_here, [received], own=rank, divisor=kept)
            self.keep = Launch(device, dtype, form, work)


def _keys(layout: Layout, hop: str) -> npt.NDArray[np.uint64]:
    """Of the name of each part's tensor."""
    return np.array([noise_layout.name_key(0, name, hop, 0) for name in layout.names], np.uint64)[layout.tensor]


def code(parts: Parts, terms: Sequence[torch.Tensor | None], divisor: int = 1, out: torch.Tensor | None = None) -> None:
    """Codes all parts: their own values, or the sum of terms in their order, divided; into a frame, or into `outs`."""
    parts.check([*terms, out])
    if parts.places.size == 0:
        return
    device, form = parts.outs[0].device, parts.form
    frame = None if out is None else out if out.data_ptr() % ALIGN == 0 else torch.empty_like(out)
    if frame is not None:
        frame.zero_()  # between scales and codes
    aligned = [term if term is None or term.data_ptr() % ALIGN == 0 else term.clone() for term in terms]
    rows = np.zeros(len(parts.array), PART)
    for name in ("key", "signs", "start", "scale_at", "code_at"):
        rows[name] = parts.array[name]
    rows["length"], rows["values"] = parts.array["n"], parts.array["out" if frame is None else "values"]
    offsets = set(parts.array["offset"].tolist())
    assert len(offsets) == 1, "parts of one frame are of one rank"
    work = Work(
        "scaled_encode" if not terms else "scaled_decode" if frame is None else "scaled_reduce", rows,
        [[0 if term is None else term.data_ptr() for term in aligned]] if terms else (),
        () if frame is None else [frame.data_ptr()],
        own=next((number for number, term in enumerate(aligned) if term is None), _NONE), divisor=divisor,
        offset=offsets.pop(), named=False,
    )  # fmt: skip
    Launch(device, torch.float32, form, work)(0)
    if frame is not None and frame is not out and out is not None:
        out.copy_(frame)
