"""Pieces of whole messages on the emulated GPU: the bytes and values of the native engine, in few launches."""

from __future__ import annotations

from typing import Any

import emulated
import numpy as np
import pytest
import torch
from conftest import gradient, same_bits
from emulated import floors
from rows_of_pieces import rows

from gradzip.engines import native
from gradzip.engines.cuda import pieces as cuda
from gradzip.engines.cuda import workspace
from gradzip.engines.layout import CODINGS, Floor, Job, body_bound
from gradzip.errors import Corrupt

CPU = torch.device("cpu")
SIZES = [1, 300, 5000, 9001, *(7 + i for i in range(15))]  # more than one launch takes
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-45, 3.4e38, 1.17549435e-38])
WIRE_ID = 2


class Case:
    """The same tensors with the same floors for both engines."""

    def __init__(self, job: Job, kind: str = "", exact: bool = False, seed: int = 0) -> None:
        self.job = job
        self.xs = [gradient(n, seed=seed + i) for i, n in enumerate(SIZES)]
        self.xs[1][: len(SPECIAL)] = SPECIAL
        self.floors = [floors(n, kind) if kind else None for n in SIZES]
        self.exact = [exact and i % 3 == 0 for i in range(len(SIZES))]

    def rows(self, tensors: list[torch.Tensor]) -> Any:
        return rows(tensors, self.floors, exact=self.exact)

    def encoded(self) -> tuple[list[torch.Tensor], Any]:
        bodies = [torch.zeros(body_bound(n, torch.float32), dtype=torch.uint8) for n in SIZES]
        places = np.array([body.data_ptr() for body in bodies])
        sizes = cuda.encode(self.rows(self.xs), places, self.job, CPU)
        return [body[:size] for body, size in zip(bodies, sizes.tolist())], sizes

    def expected(self, number: int) -> torch.Tensor:
        job = Job("lossless") if self.exact[number] else self.job
        body = torch.zeros(body_bound(SIZES[number], torch.float32), dtype=torch.uint8)
        floor = None if job.mode == "lossless" else self.floors[number]
        return body[: native.encode(self.xs[number], job, body, floor)]


CASES = [
    Case(Job("lossless")),
    Case(Job("keep", keep=7)),
    Case(Job("keep", keep=3, truncate=True)),
    Case(Job("near", shift=1), "both", exact=True),
    Case(Job("near"), "given"),
]
IDS = ["lossless", "keep=7", "keep=3", "near", "given"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bodies_and_sums_are_those_of_the_native_engine(gpu: emulated.Emulator, case: Case) -> None:
    for _ in range(2):  # the second time, launches are known
        bodies, sizes = case.encoded()
        for number, body in enumerate(bodies):
            assert torch.equal(body, case.expected(number)), SIZES[number]
    near = np.array([int(body[0]) == CODINGS["near"] for body in bodies])
    assert near.any() == (case.job.mode == "near")
    outs, expected = ([torch.full((n,), torch.nan) for n in SIZES] for _ in range(2))
    addresses = np.array([body.data_ptr() for body in bodies])
    for add in (False, True):
        cuda.decode(addresses, sizes, near, case.rows(outs), case.job.shift, add, CPU)
    cuda.check(CPU)
    for number, body in enumerate(bodies):
        for add in (False, True):
            native.decode(body, expected[number], case.floors[number], case.job.shift, add)
    assert all(map(same_bits, outs, expected))


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("unit", [1.0, 3.0])
def test_own_values_are_rounded_to_what_others_decode(gpu: emulated.Emulator, case: Case, unit: float) -> None:
    decoded = [torch.empty(n) for n in SIZES]
    for number, out in enumerate(decoded):
        native.decode(case.expected(number), out, case.floors[number], case.job.shift)
    outs, lost = ([torch.full((n,), torch.nan) for n in SIZES] for _ in range(2))
    rows = case.rows(case.xs)
    rows["lost"] = [x.data_ptr() for x in lost]
    targets = np.array([out.data_ptr() for out in outs])
    cuda.round_values(rows, case.job, CPU, targets, unit=unit)
    assert all(map(same_bits, outs, decoded))
    for x, out, left in zip(case.xs, decoded, lost):
        there = ((x - out) / unit).nan_to_num(nan=9.0)
        assert torch.equal(left.nan_to_num(nan=9.0), there), "infinities and NaN lose what no number is"
    rows["lost"] = 0
    cuda.round_values(rows, case.job, CPU, targets, add=True)
    sums = [torch.empty(n) for n in SIZES]
    for number, total in enumerate(sums):
        native.decode(case.expected(number), total, case.floors[number], case.job.shift)
        native.decode(case.expected(number), total, case.floors[number], case.job.shift, add=True)
    assert all(map(same_bits, outs, sums))


def test_words_are_copied_wherever_they_lie(gpu: emulated.Emulator) -> None:
    sizes = [4 * n for n in (*range(1, 20), 5000)]
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size + 8, dtype=torch.uint8) for size in sizes]
    places = [np.array([t.data_ptr() + offset for t in tensors]) for tensors, offset in ((sources, 0), (targets, 4))]
    cuda.copy(places[0], places[1], np.array(sizes), CPU)
    for source, target in zip(sources, targets):
        assert torch.equal(target[4:-4], source)
        assert not target[:4].any()
        assert not target[-4:].any()


def test_a_damaged_body_is_found_by_whoever_waits_next(gpu: emulated.Emulator) -> None:
    case = CASES[0]
    bodies, sizes = case.encoded()
    bodies[2][8:136] = 0xFF  # its code table
    outs = [torch.empty(n) for n in SIZES]
    addresses, near = np.array([body.data_ptr() for body in bodies]), np.zeros(len(SIZES), bool)
    for wait in (lambda: cuda.check(CPU), case.encoded):
        cuda.decode(addresses, sizes, near, case.rows(outs), 0, False, CPU)
        with pytest.raises(Corrupt):
            wait()
    case.encoded()
    cuda.check(CPU)


def test_numbers_of_launches_begin_anew_between_calls(gpu: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_EPOCHS", 50)
    for _ in range(20):
        bodies, _ = CASES[0].encoded()
        assert torch.equal(bodies[2], CASES[0].expected(2))


def test_a_floor_that_is_computed_has_the_kernels_of_its_kind() -> None:
    found = rows([gradient(3)] * 3, [None, floors(3, "given"), Floor(gradient(3), None, -160)])
    assert cuda._floor_kinds(found).tolist() == [0, 1, 2]
