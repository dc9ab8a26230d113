"""Paired runs: the same initial values, the same batches, and another way to average gradients for each.

`train_texts` trains all runs of a group at once (many.py), `train_pictures` one run. Both give rows for a CSV file.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import data, quantisers
from .gcomp import CODECS, GCompMean
from .many import Adam, Muon, Stack, compiled, rates_at
from .noise import Layout, Outcome, differences, entropy, noisy_mean, plain_mean, shape_of
from .pictures import Pictures, ResNet18
from .row_optimizer import RowOptimizer
from .texts import Gpt
from .training import WorkerGradients, shares

Row = dict[str, Any]
FIELDS = (
    *("task", "row", "seed", "workers", "steps", "budget", "share", "worst_share", "own_bits", "sum_bits", "loss"),
    *("accuracy", "train_loss", "signal", "own_square", "seconds", "beside", "device", "limit", "losses"),
)
PROBES = 6  # steps at which bits are counted
EVALUATIONS = 4  # in a run, the last included


@dataclass(frozen=True)
class Variant:
    """What one run does to gradients, or to the rest of training as a control."""

    name: str
    kind: str = "plain"  # plain, noise, integers, fp8, bf16, near, paper or gauss
    budget: float = 0.0  # of noise and gauss
    shape: str = "moments"  # of noise: moments of the optimizer, none, or momentum (Muon's, by rows and columns)
    bits: int = 32  # of integers
    block: int = 0
    nudge: float = 0.0  # the first mean gradient is multiplied by 1 + nudge
    rate: float = 1.0  # factor of the learning rate
    length: float = 1.0  # factor of the number of steps
    batch: float = 1.0  # factor of each worker's batch


Run = tuple[int, Variant]  # a seed, which says where it begins and which batches it sees


@dataclass(frozen=True)
class Group:
    """Runs that are trained together."""

    task: str
    runs: tuple[Run, ...]


class OutOfTime(Exception):
    """The group would not end before the deadline."""


class Exchange:
    """Averages a stack of gradients, each run by its variant, and keeps what was measured."""

    def __init__(
        self, layout: Layout, runs: Sequence[Run], total: int, kernels: bool,
        row_optimizer: Callable[[int], RowOptimizer] | None = None,
    ) -> None:  # fmt: skip
        """`row_optimizer`: of the run with that number, for near and paper."""
        self._layout, self._kernels, self._total = layout, kernels, total
        self._variants = [variant for _, variant in runs]
        self._seeds = [zlib.crc32(f"{seed}/{variant.name}".encode()) for seed, variant in runs]  # of rounding
        self._budgets = torch.tensor([v.budget for v in self._variants], dtype=torch.float64, device=layout.device)
        self._rng = torch.Generator(layout.device).manual_seed(runs[0][0] + 1_000_000)
        self._fp8 = quantisers.fp8_rows(layout) if any(v.kind == "fp8" for v in self._variants) else None
        self._gcomp = dict[int, GCompMean]()
        for i, variant in enumerate(self._variants):
            if variant.kind in CODECS:
                assert row_optimizer is not None
                self._gcomp[i] = GCompMean(variant.kind, layout, row_optimizer(i))
        self._shares, self._signals, self._owns = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        self._bits = [list[tuple[torch.Tensor, torch.Tensor]]() for _ in runs]
        self.step = 0

    def __call__(
        self, x: torch.Tensor, moments: torch.Tensor | None, unbiased: torch.Tensor | None, rates: Sequence[float] = ()
    ) -> torch.Tensor:
        """The mean (R, N) of stack x (R, W, N).

        Second moments (R, N), once they shape the grid, and as they are; `rates` of runs, for near and paper.
        """
        mean = torch.empty(x.shape[0], x.shape[2], device=x.device)
        error, signal = (torch.zeros(len(x), dtype=torch.float64, device=x.device) for _ in range(2))
        done = set[int]()
        for shaped in (True, False):
            rows = [i for i, v in enumerate(self._variants) if v.kind == "noise" and (v.shape != "none") == shaped]
            for part in _ranges(rows):
                found = self._noise(x[part], moments[part] if moments is not None and shaped else None, part)
                mean[part], error[part], signal[part] = found.mean, found.error, found.signal
            done.update(rows)
        for i, variant in enumerate(self._variants):
            if i in done:
                continue
            row = slice(i, i + 1)
            true = plain_mean(x[row])
            if i in self._gcomp:
                mean[i] = self._by_gcomp(i, x[i], true[0], rates[i])
            else:
                mean[row] = self._other(variant, x[row], true, None if unbiased is None else unbiased[row])
            error[row], signal[row] = differences(mean[row], true)
            if self.step == 0 and variant.nudge:
                mean[row] *= 1 + variant.nudge
        self._shares.append(error / signal)
        self._signals.append(signal)
        self._owns.append(torch.linalg.vector_norm(x, dim=-1).double().square().mean(1))
        self.step += 1
        return mean

    def _counts_bits(self) -> bool:
        return self.step > 4 and often(self.step, self._total, PROBES)

    def _noise(self, x: torch.Tensor, v: torch.Tensor | None, part: slice) -> Outcome:
        d = None if v is None else shape_of(self._layout, v)
        seeds, budgets = self._seeds[part], self._budgets[part]
        if self._counts_bits():
            for i in range(len(x)):
                one = slice(i, i + 1)
                seen = noisy_mean(
                    self._layout, x[one], None if d is None else d[one], budgets[one], seeds[one], self.step, True
                )
                assert seen.own is not None
                assert seen.sum is not None
                pair = entropy(self._layout, seen.own)[0], entropy(self._layout, seen.sum)[0]
                self._bits[part.start + i].append(pair)
        return noisy_mean(self._layout, x, d, budgets, seeds, self.step, kernels=self._kernels)

    def _by_gcomp(self, run: int, x: torch.Tensor, true: torch.Tensor, rate: float) -> torch.Tensor:
        mean, bits = self._gcomp[run](x, true, rate, self.step, self._counts_bits())
        if bits is not None:
            self._bits[run].append(bits)
        return mean

    def _other(self, variant: Variant, x: torch.Tensor, true: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        if variant.kind == "integers":
            return quantisers.two_hops(x, quantisers.integers(variant.bits, variant.block, self._rng))
        if variant.kind == "fp8":
            assert self._fp8 is not None
            return quantisers.two_hops(x, self._fp8)
        if variant.kind == "bf16":
            return quantisers.bf16_mean(x)
        if variant.kind == "gauss" and v is not None:
            drawn = torch.randn(true.shape, device=true.device, generator=self._rng)
            return true + drawn * (variant.budget * v).sqrt()
        return true

    def measured(self) -> list[Row]:
        """Of each run, over its own steps: mean and worst share, bits, and mean squares in the second half."""
        shares, signals, owns = (torch.stack(kept).cpu() for kept in (self._shares, self._signals, self._owns))
        found = []
        for i, variant in enumerate(self._variants):
            steps = max(1, round(self._total * variant.length))
            half = slice(steps // 2, steps)
            bits = [torch.stack(kind).mean().item() for kind in zip(*self._bits[i])]
            if not bits:
                fixed = {"integers": variant.bits + 16 / max(variant.block, 1), "fp8": 8.0, "bf16": 16.0}
                fixed |= dict.fromkeys(CODECS, math.nan)  # not known: no step was looked at
                bits = [fixed.get(variant.kind, 32.0)] * 2
            found.append({
                "row": variant.name, "steps": steps, "budget": variant.budget,
                "share": f"{float(shares[:steps, i].mean()):.6g}",
                "worst_share": f"{float(shares[:steps, i].max()):.6g}",
                "own_bits": f"{bits[0]:.3f}", "sum_bits": f"{bits[1]:.3f}",
                "signal": f"{float(signals[half, i].mean()):.6g}",
                "own_square": f"{float(owns[half, i].mean()):.6g}",
            })  # fmt: skip
        return found


def _ranges(rows: list[int]) -> list[slice]:
    """Neighbouring numbers as slices."""
    found = list[slice]()
    for row in rows:
        if found and found[-1].stop == row:
            found[-1] = slice(found[-1].start, row + 1)
        else:
            found.append(slice(row, row + 1))
    return found


def often(step: int, total: int, count: int) -> bool:
    return (step * count) // total != ((step - 1) * count) // total


class Clock:
    """Ends a group early that would not be done in time."""

    def __init__(self, total: int, deadline: float, device: torch.device) -> None:
        self._total, self._deadline, self._device = total, deadline, device
        self._began, self._mark, self._step = time.monotonic(), 0.0, 0
        self.per_step = math.nan

    def look(self, step: int) -> None:
        """From step 10 on the time of a step is known."""
        if step not in (10, 30) and step % 100:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if step > 10:
            self.per_step = (now - self._mark) / (step - self._step)
            if now + self.per_step * (self._total - step) > self._deadline:
                raise OutOfTime(f"{1e3 * self.per_step:.1f} ms per step, {self._total - step} steps to go")
        if step == 10:
            self._began = now
        if step >= 10:
            self._mark, self._step = now, step

    def seconds(self) -> float:
        """Of all steps, those up to the tenth as the others: compiling is not counted."""
        past = 10 if self._total > 10 else 0
        return (time.monotonic() - self._began) * self._total / (self._total - past)


# --- GPT on the bytes of enwik8 --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    workers: int = 4
    texts: int = 16  # of a worker in a step
    length: int = 128
    steps: int = 4000
    rate: float = 2e-3
    warm: float = 0.05  # of all steps, until the rate is there
    betas: tuple[float, float] = (0.9, 0.95)
    muon: float = 0.0  # its rate over AdamW's; 0 for AdamW alone
    width: int = 192
    blocks: int = 4
    heads: int = 3
    rotary: bool = True
    at_once: int = 8  # runs in one pass


_SHORT = Texts(length=256, steps=800, rate=1e-3, warm=0.1, width=384, blocks=6, heads=6, rotary=False)
TEXTS = {
    "gpt": Texts(),
    "gpt-16": Texts(workers=16, texts=4),
    "gpt-beta2": Texts(betas=(0.9, 0.999)),
    "gpt-batch8": Texts(texts=128, steps=1000, at_once=2),
    "gpt-muon": Texts(steps=2000, muon=10.0),
    "gpt-11m": Texts(length=256, steps=2000, rate=1e-3, width=384, blocks=6, heads=6, at_once=4),
    "gpt-short": _SHORT,
    "gpt-short-muon": replace(_SHORT, muon=20.0),
}
PART, HELD_OUT = 24_000_000, 1 << 20  # bytes of the text that count, and of these at the end for evaluation
WINDOWS = 2048  # held-out texts of the last evaluation; a fourth for the others


def train_texts(
    task: str, runs: Sequence[Run], root: Path, device: torch.device, *, limit: int | None = None,
    deadline: float = math.inf, kernels: bool = False, compile: bool = False, probe: int = 0,
) -> list[Row]:  # fmt: skip
    """A row for each run. `limit`: so many steps of a tiny model. `probe`: time so many steps, no rows."""
    kind = TEXTS[task]
    if limit is not None:
        kind = replace(kind, texts=max(2, kind.texts // 8), length=32, steps=limit, width=64, blocks=2, heads=2)
    runs = sorted(runs, key=lambda run: (run[1].kind != "noise", run[1].shape == "none"))  # one pass for all of noise
    variants, seeds = [variant for _, variant in runs], list(dict.fromkeys(seed for seed, _ in runs))
    text = torch.from_numpy(data.enwik8(root)[:PART].copy())
    train, test = text[:-HELD_OUT].to(device), text[-HELD_OUT:].to(device)
    models = dict[int, Gpt]()
    for seed in seeds:
        torch.manual_seed(seed)
        models[seed] = Gpt(256, kind.width, kind.blocks, kind.heads, kind.length, kind.rotary)
    stack = Stack([models[seed] for seed, _ in runs], kind.workers, device, kind.heads, kind.at_once)
    if compile:
        stack.run_block = compiled()
    optimizer: Adam
    if kind.muon:
        optimizer = Muon(stack, kind.betas, 0.1, kind.muon, [v.shape == "momentum" for v in variants])
    else:
        optimizer = Adam(stack, kind.betas, 0.1)
    exchange = Exchange(stack.layout, runs, kind.steps, kernels, optimizer.row_optimizer)
    weights = torch.zeros(len(runs), kind.texts, device=device)
    for i, variant in enumerate(variants):
        count = max(1, round(kind.texts * variant.batch))
        weights[i, :count] = 1 / count
    totals = [max(1, round(kind.steps * v.length)) for v in variants]
    peaks = [kind.rate * v.rate for v in variants]
    # All rates at once: a copy from host memory in each step would wait for the GPU.
    planned = torch.tensor([rates_at(step, totals, peaks, kind.warm) for step in range(kind.steps)])
    rates, as_numbers = planned.to(device), planned.tolist()
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    of_run = torch.tensor([seeds.index(seed) for seed, _ in runs], device=device)
    windows = test[: WINDOWS * (kind.length + 1)].view(WINDOWS, -1).long()
    windows = windows if limit is None else windows[:16]
    few = windows[: max(1, len(windows) // 4)]
    inside = torch.arange(kind.length + 1, device=device)
    kept, seen = list[torch.Tensor](), list[torch.Tensor]()
    clock = Clock(kind.steps, deadline, device)
    for step in range(kind.steps):
        clock.look(step)
        if probe and step >= probe:
            return [{"per_step": clock.per_step}]
        size, last = (kind.workers, kind.texts, 1), len(train) - kind.length - 1
        starts = torch.stack([torch.randint(last, size, device=device, generator=rng) for rng in generators])
        kept.append(stack.backward(train[starts + inside].long()[of_run], weights))
        with torch.no_grad():
            mean = exchange(stack.gradients, optimizer.moments(), optimizer.unbiased(), as_numbers[step])
            optimizer.step(mean, rates[step])
        if often(step + 1, kind.steps, EVALUATIONS) and step + 1 < kind.steps:
            seen.append(stack.evaluate(few, 64))
    seen.append(stack.evaluate(windows, 64))
    curve, figures = torch.stack(kept).double().cpu(), torch.stack(seen).cpu()
    rows = exchange.measured()
    for i, row in enumerate(rows):
        tail = curve[int(0.9 * row["steps"]) : row["steps"], i]
        row |= {
            "task": task, "seed": runs[i][0], "workers": kind.workers, "loss": f"{float(figures[-1, i]):.7f}",
            "accuracy": "", "train_loss": f"{float(tail.mean()):.7f}", "limit": limit or "", "beside": len(runs),
            "losses": " ".join(f"{float(f):.6f}" for f in figures[:, i]),
            "seconds": round(clock.seconds() / len(rows), 2), "device": name_of(device),
        }  # fmt: skip
    return rows


# --- ResNet-18 on CIFAR-10 -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Photos:
    batches: int = 2  # of the five official ones, 10,000 pictures each
    workers: int = 4
    batch: int = 64
    epochs: int = 10
    rate: float = 0.2


DECAY, MOMENTUM = 5e-4, 0.9
PHOTOS = {"cifar20k": Photos(), "cifar50k": Photos(batches=5, epochs=6), "cifar20k-16": Photos(workers=16, batch=16)}


class RowState:
    """Parameters and momentum of SGD as rows, which near and paper ask for floors and reaches."""

    def __init__(self, layout: Layout, parameters: Sequence[torch.Tensor], optimizer: torch.optim.SGD) -> None:
        self._layout, self._parameters, self._optimizer = layout, list(parameters), optimizer
        self._values, self._momentum = (torch.zeros(layout.length, device=layout.device) for _ in range(2))

    def row_optimizer(self, run: int = 0) -> RowOptimizer:
        state, sgd = {"momentum_buffer": self._momentum}, torch.optim.SGD
        return RowOptimizer(self._layout, sgd, self._values, state, DECAY, lr=0.1, momentum=MOMENTUM, nesterov=True)

    def copy(self) -> None:
        """Takes over what the optimizer's last step has left."""
        torch._foreach_copy_(self._layout.views(self._values), self._parameters)
        momentum = [self._optimizer.state[p].get("momentum_buffer") for p in self._parameters]
        if all(buffer is not None for buffer in momentum):
            torch._foreach_copy_(self._layout.views(self._momentum), momentum)


def train_pictures(
    task: str, seed: int, variant: Variant, root: Path, device: torch.device, *, limit: int | None = None,
    deadline: float = math.inf, kernels: bool = False, probe: int = 0,
) -> list[Row]:  # fmt: skip
    """SGD with momentum 0.9 and Nesterov, weight decay 5e-4, a rate that rises and falls linearly."""
    kind = PHOTOS[task]
    began = time.monotonic()
    pictures = Pictures(root, device, 10, limit, kind.batches)
    size = kind.batch if limit is None else 4
    torch.manual_seed(seed)
    model: ResNet18 = ResNet18(10, 64 if limit is None else 8).to(  # type: ignore[call-overload]  # torch's stubs lack memory_format
        device, memory_format=torch.channels_last
    )
    named = dict(model.named_parameters())
    layout = Layout({name: tuple(p.shape) for name, p in named.items()}, kind.workers, device)
    stack = torch.zeros(1, kind.workers, layout.length, device=device)
    rows = [layout.views(stack[0, rank]) for rank in range(kind.workers)]
    count = max(1, round(size * variant.batch))

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x)
        return F.cross_entropy(logits.float()[:count], y[:count])

    gradients = WorkerGradients(model, forward, rows, device.type == "cuda")
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=MOMENTUM, nesterov=True)
    per_epoch = len(pictures) // (kind.workers * size)
    total = per_epoch * kind.epochs
    state = RowState(layout, list(named.values()), optimizer) if variant.kind in CODECS else None
    exchange = Exchange(layout, [(seed, variant)], total, kernels, None if state is None else state.row_optimizer)
    rng = torch.Generator(device).manual_seed(seed)
    kept, clock = list[torch.Tensor](), Clock(total, deadline, device)
    steps = max(1, round(total * variant.length))
    order = torch.empty(0)
    for step in range(steps):
        clock.look(step)
        if probe and step >= probe:
            return [{"per_step": clock.per_step}]
        if step % per_epoch == 0:
            order = shares(torch.randperm(len(pictures), device=device, generator=rng), kind.workers, size)
        x, y = pictures.batch(order[step % per_epoch].reshape(-1), rng)
        kept.append(gradients(zip(x.split(size), y.split(size))))
        rate = rates_at(step, [steps], [kind.rate * variant.rate], 0.2)[0]
        with torch.no_grad():
            if state is not None:
                state.copy()
            mean = exchange(stack, None, None, [rate])
            for p, g in zip(named.values(), layout.views(mean[0])):
                p.grad = g.contiguous(memory_format=torch.channels_last) if g.dim() == 4 else g
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        found = [(model(x).float(), y) for x, y in pictures.test()]
    loss = torch.stack([F.cross_entropy(logits, y, reduction="sum") for logits, y in found]).sum().double()
    right = torch.stack([(logits.argmax(1) == y).sum() for logits, y in found]).sum()
    curve = torch.stack(kept).double().cpu()
    row = exchange.measured()[0] | {
        "task": task, "seed": seed, "workers": kind.workers, "loss": f"{float(loss) / len(pictures.y_test):.7f}",
        "accuracy": f"{100 * float(right) / len(pictures.y_test):.2f}",
        "train_loss": f"{float(curve[int(0.9 * len(curve)) :].mean()):.7f}", "limit": limit or "", "beside": 1,
        "losses": "", "seconds": round(time.monotonic() - began, 2), "device": name_of(device),
    }  # fmt: skip
    return [row]


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
