"""Tensors of one size whose picked values are averaged together: the same means and residuals as one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from conftest import gradient, same_bits

from gradzip.codecs import Context, parse
from gradzip.exchange import averaged_frames, rounds
from gradzip.exchange.averaged_frames import AveragedFrames
from gradzip.exchange.interpreter import run_rounds
from gradzip.exchange.topology import Topology
from gradzip.feedback import Memory

CODECS = [
    *("randomk:ratio=0.1", "randomblock:ratio=0.1", "randomk:ratio=1.0", "randomblock:ratio=1.0"),
    *("randomk:ratio=0.3,unbiased=true", "randomblock:ratio=0.3,unbiased=true,feedback=true"),
    *("randomk:feedback=bf16", "randomblock:feedback=cpu", "randomk:feedback=false"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(300,), (20, 15), (4,), (3, 5, 4, 5), (7,), (2, 2), (15, 20), (40, 50), (300,), (40, 50), (4,), (0,)]
NAMES = [f"layer.{number}" for number in range(len(SIZES))]
WORLD = 2
TOPOLOGY = Topology.of_ranks(0, list(range(WORLD)))


class Step(NamedTuple):
    scale: float = 1.0
    flaw: float = 1.0  # what a value of rank 1 is multiplied by
    idle: Sequence[int] = ()  # tensors without a gradient
    reads_state: bool = False  # takes apart what is kept as one


STEPS = [
    *(Step(), Step(), Step(flaw=torch.nan), Step(scale=1024.0), Step(idle=(0, 2, 8)), Step(flaw=-torch.inf, scale=2.0)),
    *(Step(reads_state=True), Step(), Step(scale=3.0), Step(idle=(1,), scale=0.7), Step()),
]


def in_one_buffer(dtype: torch.dtype) -> list[torch.Tensor]:
    """As DDP has its gradients; two of them lie in another order of dimensions."""
    numels = [torch.Size(shape).numel() for shape in SIZES]
    buffer = torch.empty(sum(numels), dtype=dtype)
    tensors = [part.view(shape) for part, shape in zip(buffer.split_with_sizes(numels), SIZES)]
    tensors[1] = tensors[1].view(15, 20).t()
    tensors[3] = tensors[3].view(3, 4, 5, 5).permute(0, 3, 1, 2)
    return tensors


def apart(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape in SIZES]


def at_equal_distances(dtype: torch.dtype) -> list[torch.Tensor]:
    """As matrices and vectors of equal layers lie in a bucket."""
    buffer = torch.empty(5, 307, dtype=dtype)
    return [part for row in buffer for part in (row[:300].view(20, 15), row[300:])]


LAYOUTS = {"in one buffer": in_one_buffer, "apart": apart, "at equal distances": at_equal_distances}


def trained(codec: str, dtype: torch.dtype, layout: str, patient: bool, known: bool) -> list[torch.Tensor]:
    """Means and states of all ranks over some steps."""
    made, memories, found = parse(codec), [Memory(rank, patient) for rank in range(WORLD)], list[torch.Tensor]()
    of_ranks = [LAYOUTS[layout](dtype) for _ in range(WORLD)]
    names = [f"layer.{number}" for number in range(len(of_ranks[0]))]
    about = [AveragedFrames(made, names, tensors) if known else None for tensors in of_ranks]
    before = {name: 0.01 * gradient(x.numel(), seed=5).view(x.shape) for name, x in zip(names, of_ranks[0])}
    for memory in memories:
        memory.forms |= dict.fromkeys(names, made.error_memory)
        for name, residual in before.items():  # of a codec that the model had before
            memory.keep(name, residual.clone())
        memory.commit()
    for number, step in enumerate(STEPS):
        for rank, tensors in enumerate(of_ranks):
            for i, x in enumerate(tensors):
                drawn = gradient(x.numel(), seed=100 * number + 10 * rank + i) * step.scale
                x.copy_((drawn * (i not in step.idle)).view(x.shape))
            if rank == 1:
                tensors[0].view(-1)[3] *= step.flaw
        contexts = [[Context(name, number, 7, rank, WORLD, step.scale) for name in names] for rank in range(WORLD)]
        each = zip(of_ranks, contexts, memories, about)
        finite = run_rounds([rounds.of(made, x, ctx, memory, step.scale, of) for x, ctx, memory, of in each], TOPOLOGY)
        assert finite == [all(bool(x.isfinite().all()) for x in of_ranks[0])] * WORLD
        for memory in memories:
            memory.commit() if finite[0] else memory.drop()
        found += [x.clone() for tensors in of_ranks for x in tensors]
        if step.reads_state or number == len(STEPS) - 1:
            states = [sorted(memory.state_dict().items()) for memory in memories]
            found += [torch.as_tensor(value) for state in states for _, value in state]
            assert {key for key, _ in states[0]} >= {"rank0/entries"}
    return found


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """All but the bits of NaNs, which in 16 bits follow from a value's place in torch's vectors."""
    return torch.equal(x.isnan(), y.isnan()) and same_bits(x.masked_fill(x.isnan(), 0), y.masked_fill(y.isnan(), 0))


CASES = [
    *[(codec, dtype, "in one buffer", False) for codec in CODECS for dtype in (torch.float32, torch.bfloat16)],
    *[(codec, dtype, "in one buffer", True) for codec in CODECS[:2] for dtype in (torch.float32, torch.float16)],
    *[(codec, dtype, layout, False) for codec in CODECS[:2] for dtype in DTYPES for layout in list(LAYOUTS)[1:]],
    *[(codec, dtype, "in one buffer", False) for codec in CODECS[4:6] for dtype in (torch.float16, torch.float64)],
]


@pytest.mark.parametrize(("codec", "dtype", "layout", "patient"), CASES, ids=str)
def test_tensors_of_one_size_give_the_same_bits_together_as_one_by_one(
    codec: str, dtype: torch.dtype, layout: str, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaged_frames, "LONGEST", 1000)  # that of 40 x 50 does not share a matrix
    together = trained(codec, dtype, layout, patient, known=True)
    monkeypatch.setattr(averaged_frames, "_is_a_row", lambda tensor: False)
    one_by_one = trained(codec, dtype, layout, patient, known=False)
    assert len(together) == len(one_by_one) > 0
    assert all(map(same, together, one_by_one))


def test_a_step_that_was_dropped_leaves_no_trace() -> None:
    """What is kept as one is not written to by the next step."""
    tensors, memory = in_one_buffer(torch.float32), Memory(0)
    known, codec = AveragedFrames(parse("randomk"), NAMES, tensors), parse("randomk")

    def step(number: int) -> None:
        for i, x in enumerate(tensors):
            x.copy_(gradient(x.numel(), seed=number + i).view(x.shape))
        contexts = [Context(name, number) for name in NAMES]
        assert rounds.run(lambda: rounds.of(codec, tensors, contexts, memory, 1.0, known), lambda flat: None)

    step(0)
    memory.commit()
    step(1)
    memory.commit()
    kept = memory.kept_by(known._rows[0], known._rows[0]._names)
    assert kept is not None, "residuals of equal tensors stay together"
    before = copy.deepcopy(list(kept.residuals))
    step(2)
    memory.drop()
    assert memory.kept_by(known._rows[0], known._rows[0]._names) is kept
    assert all(same_bits(x, y) for x, y in zip(before, kept.residuals) if x is not None and y is not None)


def test_residuals_do_not_hold_the_gradients_that_ddp_gives_up() -> None:
    tensors, memory = in_one_buffer(torch.float32), Memory(0)
    storage = tensors[0].untyped_storage().data_ptr()
    codec, contexts = parse("randomblock"), [Context(name) for name in NAMES]
    rounds.run(lambda: rounds.of(codec, tensors, contexts, memory), lambda flat: None)
    memory.commit()
    residuals = [memory.residual(name) for name in NAMES]
    assert all(x is not None and x.untyped_storage().data_ptr() != storage for x in residuals[:-1])
