"""experiments/workers/gcomp.py: the means of paired runs in near and paper mode are those of frames, bit for bit.

Floors come from an optimizer whose parameters are whole rows; here each tensor has a parameter of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same_bits
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import gradzip
from gradzip.codecs import Context, parse
from gradzip.codecs.gcomp import GComp
from gradzip.policy import small

sys.path.append(str(Path(__file__).parent.parent / "experiments"))
from workers import paired
from workers.gcomp import CODECS, GCompMean
from workers.many import Adam, Muon, Stack
from workers.noise import Layout, plain_mean
from workers.paired import Exchange, Group, RowState, Variant
from workers.row_optimizer import RowOptimizer
from workers.texts import Gpt

CPU = torch.device("cpu")
SHAPES = {"a.weight": (70, 130), "b.bias": (300,), "halved.weight": (64, 100), "zero": (9, 200), "tiny": (8, 8),
          "d.weight": (8, 6, 5, 5)}  # fmt: skip
RATES = (0.0, 1e-3, 1e-3, 4e-4, 1e-2, 2e-5)
NEAR, PAPER = Variant("near", "near"), Variant("paper", "paper")


class Run:
    """Parameters of one run under an optimizer of torch, and its gradients in a stack (W, N)."""

    def __init__(self, kind: type[Optimizer], world: int, device: torch.device = CPU) -> None:
        self.layout, self.world, self._rng = Layout(SHAPES, world, device), world, torch.Generator().manual_seed(world)
        self.parameters = [nn.Parameter(0.1 * self._drawn(shape).to(device)) for shape in SHAPES.values()]
        self.parameters[0].data[0, :3] = torch.tensor([0.0, 1e-39, 1e20])
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": paired.DECAY},
            {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._rows = {key: torch.zeros(self.layout.length, device=device) for key in ("exp_avg", "exp_avg_sq")}
        self._values = torch.zeros(self.layout.length, device=device)
        self.optimizer: Optimizer
        if kind is AdamW:
            self.optimizer = AdamW(groups, betas=(0.9, 0.95))
            settings = {"betas": (0.9, 0.95)}
            self.of_rows = RowOptimizer(self.layout, AdamW, self._values, self._rows, paired.DECAY, **settings)
        else:
            self.optimizer = SGD(groups, lr=0.1, momentum=paired.MOMENTUM, nesterov=True)
            self._state = RowState(self.layout, self.parameters, self.optimizer)
            self.of_rows = self._state.row_optimizer()

    def _drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self._rng) * torch.rand(shape, generator=self._rng).pow(6)

    def gradients(self) -> torch.Tensor:
        x = torch.zeros(self.world, self.layout.length)
        for name, view in zip(SHAPES, Layout(SHAPES, self.world, CPU).views(x)):
            if name != "zero":
                drawn = 1e-2 * self._drawn(tuple(view.shape))
                view.copy_(drawn.bfloat16() if name == "halved.weight" else drawn)
        x[0, :4] = torch.tensor([-0.0, 1e-40, 1e20, 3e-38])  # beyond 2^83 the codec's paper mode cuts fewer bits
        return x.to(self.layout.device)

    def begin_step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if isinstance(self.optimizer, SGD):
            self._state.copy()
            return
        for view, p in zip(self.layout.views(self._values), self.parameters):
            view.copy_(p.detach())
        for key, row in self._rows.items():
            for view, p in zip(self.layout.views(row), self.parameters):
                if self.optimizer.state[p]:
                    view.copy_(self.optimizer.state[p][key])

    def step(self, mean: torch.Tensor) -> None:
        for p, view in zip(self.parameters, self.layout.views(mean)):
            p.grad = view
        self.optimizer.step()


class Frames:
    """What ranks send each other, tensor by tensor, with gradzip's floors of each parameter."""

    def __init__(self, kind: str) -> None:
        codec = parse(CODECS[kind])
        assert isinstance(codec, GComp)
        self.codec, self._states = codec, dict[tuple[int, str], dict[str, Any]]()
        self.lossless, self.own_bytes, self.sum_bytes = set[str](), 0, 0

    def _grids(self, run: Run) -> list[torch.Tensor | None]:
        if self.codec.mode == "paper":
            return [gradzip.reaches(run.optimizer)[p].reshape(-1) for p in run.parameters]
        found = [gradzip.rules(run.optimizer, self.codec.ulps)[p] for p in run.parameters]
        return [None if rule is None else rule.tensor() for rule in found]

    def mean(self, run: Run, x: torch.Tensor, step: int) -> list[torch.Tensor]:
        found, world = list[torch.Tensor](), run.world
        self.lossless, self.own_bytes, self.sum_bytes = set(), 0, 0
        for t, (name, grid) in enumerate(zip(run.layout.names, self._grids(run))):
            rows = [run.layout.views(row)[t].reshape(-1) for row in x]
            if grid is None or small(run.layout.shapes[t]):
                found.append(plain_mean(torch.stack(rows)[None])[0])
                continue
            context = Context(name, step, world=world, floor=grid)
            total = torch.zeros(0)
            for rank, own in enumerate(rows):
                state = self._states.setdefault((rank, name), {})
                (is_exact,) = self.codec.own_exact([own], [context], [state])
                codec = self.codec.exact if is_exact else self.codec
                self.lossless |= {name} if is_exact else set()
                frame = codec.encode(own, context)
                self.own_bytes += frame.numel() if rank == 0 else 0
                sent = codec.decode(frame, context)
                total = total + sent if rank else sent
            near = self.codec.mode == "near"
            on_sums = Context(name, step, world=world, floor=grid, shift=world.bit_length() - 1 if near else 0)
            frame = self.codec.encode(total if near else total / world, on_sums)
            self.sum_bytes += frame.numel()
            result = self.codec.decode(frame, on_sums)
            found.append(result / world if near else result)
        return found


def coded_values() -> int:
    return sum(torch.Size(shape).numel() for shape in SHAPES.values() if not small(shape))


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("optimizer", [AdamW, SGD])
@pytest.mark.parametrize("kind", CODECS)
def test_means_are_those_of_frames(kind: str, optimizer: type[Optimizer], world: int) -> None:
    run, frames = Run(optimizer, world), Frames(kind)
    ours, rounded = GCompMean(kind, run.layout, run.of_rows), 0
    for step, rate in enumerate(RATES):
        run.begin_step(rate)
        x = run.gradients()
        true = plain_mean(x[None])[0]
        mean, bits = ours(x, true, rate, step, probe=True)
        for name, found, expected in zip(run.layout.names, run.layout.views(mean), frames.mean(run, x, step)):
            assert same_bits(found.reshape(-1), expected), (name, step)
        assert not mean[~run.layout.valid].any()
        if kind == "near":
            assert frames.lossless <= {"halved.weight", "zero"}
            assert ("halved.weight" in frames.lossless) == (rate > 0), "or the choice is not tested"
        if bits is None:
            assert (kind, rate) == ("near", 0.0)
            assert same_bits(mean, true)
        else:
            counted = [float(b) * coded_values() / 8 for b in bits]
            assert counted == pytest.approx([frames.own_bytes, frames.sum_bytes])
            rounded += int((mean != true).sum())
        run.step(mean)
    assert rounded > 1000, "or nothing was compared"


def test_adams_rows_have_the_floors_and_reaches_of_its_tensors() -> None:
    torch.manual_seed(0)
    models = [Gpt(50, 32, 2, 2, 16, True) for _ in range(2)]
    stack = Stack(models, 2, CPU, 2, at_once=2)
    ours, rates = Adam(stack, (0.9, 0.95), 0.1), (0.0, 1e-3, 3e-3)
    rows = [ours.row_optimizer(run) for run in range(2)]
    for step, rate in enumerate(rates):
        for run, of_rows in enumerate(rows):
            tensors = [nn.Parameter(view[run].clone()) for view in stack.layout.views(stack.values)]
            groups = [
                {"params": [p for p in tensors if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0},
            ]
            theirs = AdamW(groups, lr=rate * (run + 1), betas=(0.9, 0.95))
            for p, m, v in zip(tensors, *(stack.layout.views(flat) for flat in (ours.m, ours.v))):
                if step:
                    theirs.state[p] = {"step": torch.tensor(float(step)), "exp_avg": m[run], "exp_avg_sq": v[run]}
            of_rows.begin_step(rate * (run + 1), step)
            floors, reaches = of_rows.floors(1), of_rows.reaches()
            assert (floors is None) == (rate == 0)
            for t, p in enumerate(tensors):
                assert torch.equal(stack.layout.views(reaches)[t], gradzip.reaches(theirs)[p])
                if floors is not None:
                    assert torch.equal(stack.layout.views(floors)[t], gradzip.floors(theirs)[p])
        mean = torch.where(stack.layout.valid, 1e-3 * torch.randn(2, stack.layout.length), 0.0)
        ours.step(mean, torch.tensor([rate, 2 * rate]))


def test_muon_is_refused_where_everything_would_go_lossless() -> None:
    stack = Stack([Gpt(50, 32, 2, 2, 16, True)], 2, CPU, 2, at_once=2)
    muon = Muon(stack, (0.9, 0.95), 0.1, 10.0, [False])
    with pytest.raises(ValueError, match="Muon"):
        Exchange(stack.layout, [(0, NEAR)], 8, False, muon.row_optimizer)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random pictures in the form of CIFAR-10, and random bytes in that of enwik8."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        rows = rng.integers(0, 256, (24, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    (tmp_path / "enwik8").mkdir()
    (tmp_path / "enwik8/enwik8").write_bytes(rng.integers(0, 256, paired.HELD_OUT + 100_000, dtype=np.uint8).tobytes())
    return tmp_path


def by_texts(group: Group, root: Path) -> list[dict[str, Any]]:
    return paired.train_texts(group.task, group.runs, root, CPU, limit=40)


def by_pictures(group: Group, root: Path) -> list[dict[str, Any]]:
    return [
        row
        for seed, variant in group.runs
        for row in paired.train_pictures(group.task, seed, variant, root, CPU, limit=48)
    ]


@pytest.mark.parametrize(("task", "train"), [("gpt", by_texts), ("cifar20k", by_pictures)])
def test_tiny_runs_stay_close_to_plain(
    task: str, train: Callable[[Group, Path], list[dict[str, Any]]], data: Path
) -> None:
    runs = tuple((0, variant) for variant in (Variant("plain"), NEAR, PAPER, Variant("BF16", "bf16")))
    rows = {row["row"]: row for row in train(Group(task, runs), data)}
    for name in ("near", "paper"):
        assert set(rows[name]) == set(paired.FIELDS)
        assert 0 < float(rows[name]["share"]) < 1e-3 * float(rows["BF16"]["share"])
        assert float(rows[name]["loss"]) == pytest.approx(float(rows["plain"]["loss"]), rel=1e-3)
        assert 2 < float(rows[name]["own_bits"]) < 30
        assert 2 < float(rows[name]["sum_bits"]) < 30
    assert rows["near"]["loss"] != rows["paper"]["loss"] or rows["near"]["share"] != rows["paper"]["share"]


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [AdamW, SGD])
@pytest.mark.parametrize("kind", CODECS)
def test_a_gpu_has_the_same_bits(kind: str, optimizer: type[Optimizer]) -> None:
    device = torch.device("cuda")
    here, there = (Run(optimizer, 4, place) for place in (CPU, device))
    ours, theirs = (GCompMean(kind, run.layout, run.of_rows) for run in (here, there))
    for step, rate in enumerate(RATES):
        for p, q in zip(here.parameters, there.parameters):
            q.data.copy_(p.data)
            for key, value in here.optimizer.state[p].items():
                there.optimizer.state[q][key] = value.to(device) if value.dim() else value
        for run in (here, there):
            run.begin_step(rate)
        x = here.gradients()
        mean, bits = ours(x, plain_mean(x[None])[0], rate, step, probe=True)
        found, of_gpu = theirs(x.to(device), plain_mean(x.to(device)[None])[0], rate, step, probe=True)
        assert same_bits(found.cpu(), mean), step
        assert (bits is None) == (of_gpu is None)
        if bits is not None and of_gpu is not None:
            assert [float(b) for b in bits] == [float(b) for b in of_gpu]
        here.step(mean)
