"""Measures near mode's promise on a small real training run; writes results.csv, drift.csv and README.md's tables.

A byte-level transformer learns Python's own library. At some steps its gradients are exchanged among 1, 4 and 64
emulated ranks through the real codec, from the same state raw and coded, and the optimizer is evaluated in float64 and
in float32. Apart from that, whole runs are compared: how far do coding and another order of sums take them apart?
"""

from __future__ import annotations

import argparse
import copy
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import gradzip
from gradzip.capture import CONTEXT, ByteModel, ModelSize, corpus
from gradzip.engines.layout import EXACT

HERE = Path(__file__).parent
SIZE = ModelSize(width=64, blocks=1, batch=1)
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.3}),
    "Momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    "Nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    "Adagrad": (Adagrad, {"lr": 0.01}),
    "RMSprop": (RMSprop, {"lr": 1e-3}),
    "Adam": (Adam, {"lr": 1e-3, "weight_decay": 1e-4}),
    "AdamW": (AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
}
CODECS = ("gcomp", "gcomp:ulps=256", "gcomp:mode=paper")
WORLDS = (1, 4, 64)
RUN_RANKS = 4  # of the training runs themselves


@dataclass
class Row:
    """One codec, optimizer and world size at one step."""

    optimizer: str
    world: int
    codec: str
    step: int
    largest: float  # distance in ulps with the optimizer in float64 and exact sums: what near mode promises
    largest_fp32_sum: float  # the same, but with sums in float32, as they really are
    largest_raw_fp32_sum: float  # what those sums do without any codec
    same: float  # shares of parameters, all in float32: bit-identical after the step
    ulp_1: float
    ulp_2: float
    ulp_more: float
    reverse_same: float  # the same shares for the uncompressed sum in reverse rank order
    reverse_1: float
    reverse_2: float
    reverse_more: float
    bits: float  # per value, in the frame of a rank's gradient
    bits_sum: float  # per value, in the frame of the sum


@dataclass
class Drift:
    """How far a whole run has come from the uncompressed one."""

    optimizer: str
    run: str
    step: int
    distance: float  # |theta - theta_raw| / |theta_raw|
    loss: float  # of the step's batch, mean over ranks
    raw_loss: float


# --- Training ----------------------------------------------------------------------------------------------------


class Training:
    """A model and its optimizer; hands out the gradient of any rank at any step."""

    def __init__(self, name: str, text: torch.Tensor):
        torch.manual_seed(0)
        self.model = ByteModel(SIZE)
        kind, options = OPTIMIZERS[name]
        self.optimizer = kind(self.model.parameters(), **options)
        self.parameters = list(self.model.parameters())
        self.text = text

    def gradients(self, step: int, ranks: Iterable[int]) -> tuple[list[torch.Tensor], float]:
        """The flat gradient of each rank, and the mean loss."""
        result, losses = [], []
        for rank in ranks:
            rng = torch.Generator().manual_seed(step * 1000 + rank)
            starts = torch.randint(self.text.numel() - CONTEXT, (SIZE.batch, 1), generator=rng)
            window = self.text[starts + torch.arange(CONTEXT + 1)].long()
            loss = F.cross_entropy(self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            result.append(_flat(torch.autograd.grad(loss, self.parameters)))
            losses.append(loss.item())
        return result, sum(losses) / len(losses)

    def step(self, mean: torch.Tensor) -> None:
        for p, part in zip(self.parameters, _split(mean, self.parameters)):
            p.grad = part
        self.optimizer.step()

    def after(self, mean: torch.Tensor) -> torch.Tensor:
        """The flat parameters after a step with that gradient, evaluated in its type; nothing here changes."""
        copies = [torch.nn.Parameter(p.detach().to(mean.dtype, copy=True)) for p in self.parameters]
        twin = copy.copy(self.optimizer)
        twin.state, twin.param_groups = type(twin.state)(dict), [{**self.optimizer.param_groups[0], "params": copies}]
        state = copy.deepcopy(self.optimizer.state_dict())  # or both would count steps in the same tensor
        twin.load_state_dict(state)
        for p, part in zip(copies, _split(mean, copies)):
            p.grad = part
        twin.step()
        return _flat(p.detach() for p in copies)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [p.numel() for p in like])
    return [part.view_as(p).clone() for part, p in zip(parts, like)]


# --- Exchange ----------------------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """What the ranks agree on with one codec."""

    mean: torch.Tensor  # float32, as in training
    exact: torch.Tensor  # float64, with exact sums
    bits: float
    bits_sum: float


def exchange(training: Training, ranks: list[torch.Tensor], text: str) -> Exchange:
    codec = gradzip.parse(text)
    assert isinstance(codec, gradzip.codecs.gcomp.GComp)
    near = codec.mode == "near"
    found = gradzip.floors(training.optimizer, codec.ulps) if near else gradzip.reaches(training.optimizer)
    floors = _flat(found[p] for p in training.parameters)
    context = gradzip.Context(floor=floors)
    frames = [codec.encode(g, context) for g in ranks]
    coded = [codec.decode(frame, context) for frame in frames]
    shift = len(ranks).bit_length() - 1
    sum_context = gradzip.Context(floor=floors, shift=shift)
    sum_frame = codec.encode(sum_in_order(coded), sum_context)
    mean = codec.decode(sum_frame, sum_context) / len(ranks)
    total = torch.stack(coded).double().sum(0)
    if near:
        exact = torch.where(floors == EXACT, total, _rounded(total, floors.double() + shift)) / len(ranks)
    else:
        exact = _cut(total, floors.double() * 2.0**shift) / len(ranks)
    values = floors.numel()
    return Exchange(mean, exact, 8 * frames[0].numel() / values, 8 * sum_frame.numel() / values)


def _rounded(total: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Near mode's mapping of a sum that float32 could not hold."""
    grid = torch.exp2(floor.clamp(max=127))
    return torch.where(total.abs() < grid * 2**24, (total / grid).round() * grid, total)


def _cut(total: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """Paper mode's mapping of a sum that float32 could not hold."""
    exponent = torch.frexp(total).exponent.double() - 1
    level = torch.stack([reach > total.abs() * 2.0**n for n in (6, 12, 18)]).double().sum(0)
    grid = torch.exp2(exponent - 23 + 6 * level)
    return torch.where(level > 0, (total / grid).trunc() * grid, total)


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    return total


# --- Measurements ------------------------------------------------------------------------------------------------


def ulps_apart(a: torch.Tensor, b: torch.Tensor, theta: torch.Tensor) -> float:
    """The largest distance of float64 values, in float32 ulps of theta."""
    exponent = torch.frexp(theta.double()).exponent - 1
    return float(((a - b).abs() / torch.exp2(exponent.clamp(min=-126).double() - 23)).max())


def histogram(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float, float]:
    """Shares of float32 values that are 0, 1, 2 and more representable values apart."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32).long()
        return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    apart = (ordered(a) - ordered(b)).abs().clamp(max=3)
    zero, one, two, more = (torch.bincount(apart, minlength=4) / apart.numel()).tolist()
    return zero, one, two, more


def measure(name: str, training: Training, step: int) -> list[Row]:
    """All codecs and world sizes, from the state that the training is in."""
    every_rank, _ = training.gradients(step, range(max(WORLDS)))
    theta = _flat(p.detach() for p in training.parameters)
    rows = []
    for world in WORLDS:
        ranks = every_rank[:world]
        raw_mean = sum_in_order(ranks) / world
        exact = training.after(torch.stack(ranks).double().mean(0))
        raw, reverse = training.after(raw_mean), training.after(sum_in_order(ranks[::-1]) / world)
        raw_distance = ulps_apart(exact, training.after(raw_mean.double()), theta)
        for text in CODECS:
            result = exchange(training, ranks, text)
            largest = ulps_apart(exact, training.after(result.exact), theta)
            largest_fp32 = ulps_apart(exact, training.after(result.mean.double()), theta)
            distances = (largest, largest_fp32, raw_distance)
            coded_shares = histogram(raw, training.after(result.mean))
            sizes = (result.bits, result.bits_sum)
            rows.append(Row(name, world, text, step, *distances, *coded_shares, *histogram(raw, reverse), *sizes))
    return rows


def run(
    name: str, text: torch.Tensor, measured: Sequence[int], compared: Sequence[int]
) -> tuple[list[Row], list[Drift]]:
    """One optimizer: the measurements along its uncompressed run, and the drift of the other runs from that."""
    runs = {"raw": Training(name, text), "reverse order": Training(name, text)}
    runs |= {codec: Training(name, text) for codec in CODECS}
    rows: list[Row] = []
    drifts: list[Drift] = []
    for step in range(1, max(*measured, *compared) + 1):
        if step in measured:
            rows += measure(name, runs["raw"], step)
        losses = {}
        for kind, training in runs.items():
            ranks, losses[kind] = training.gradients(step, range(RUN_RANKS))
            if kind in CODECS:
                training.step(exchange(training, ranks, kind).mean)
            else:
                training.step(sum_in_order(ranks if kind == "raw" else ranks[::-1]) / RUN_RANKS)
        if step in compared:
            raw = _flat(p.detach() for p in runs["raw"].parameters).double()
            for kind, training in runs.items():
                theta = _flat(p.detach() for p in training.parameters).double()
                distance = float((theta - raw).norm() / raw.norm())
                drifts.append(Drift(name, kind, step, distance, losses[kind], losses["raw"]))
    return rows, drifts


def write(path: Path, rows: Sequence[Row] | Sequence[Drift], kind: type[Row] | type[Drift]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(kind)])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", type=int, nargs="+", default=[1, 2, 10, 40, 120], help="steps to measure at")
    parser.add_argument("--compare", type=int, nargs="+", default=[1, 10, 40, 120], help="steps to compare runs at")
    parser.add_argument("--only", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = corpus()
    rows: list[Row] = []
    drifts: list[Drift] = []
    for name in options.only:
        more, further = run(name, text, options.measure, options.compare)
        rows += more
        drifts += further
        worst = max(row.largest for row in more if row.codec == "gcomp")
        print(f"{name}: at most {worst:.3f} ulp apart", flush=True)
    write(options.out / "results.csv", rows, Row)
    write(options.out / "drift.csv", drifts, Drift)
    print(tables.update(options.out))


if __name__ == "__main__":
    main()
