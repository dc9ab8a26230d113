"""GComp's own method as published: float32 gradients, four levels by |delta| > 2^n, zeros pruned. On a CPU.

    python experiments/gcomp/float32.py --data DATA [TASK]      # appends what levels.csv and float32.csv lack

Short runs of small nets, four workers each, whose gradients go through real frames: every worker's own, and those of
their sum. Rows of one task begin with the same values and see the same batches. The plain run is looked at as well:
zeros, levels, bits of each mode, and what levels and pruning save of sign and mantissa (the paper's Figure 14).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "src")]
from series import append  # noqa: E402
from workers import data  # noqa: E402
from workers.pictures import Pictures, ResNet18  # noqa: E402
from workers.texts import Bert, Gpt, sentences  # noqa: E402

import gradzip  # noqa: E402
from gradzip.codecs import Context, parse  # noqa: E402
from gradzip.codecs.gcomp import GComp, paper_levels  # noqa: E402
from gradzip.policy import small  # noqa: E402

WORLD, FIELD = 4, 24  # workers; bits of sign and mantissa
POLICIES = {
    "plain": "", "paper": "gcomp:mode=paper", "18-bit truncation": "gcomp:keep=5,round=truncate,feedback=false",
    "near": "gcomp:own=near", "nudged": "",
}  # fmt: skip
CODECS = ("gcomp:mode=paper", "gcomp:own=near", "noise", "gcomp:mode=lossless", "gcomp:keep=7")
LEVEL_FIELDS = (
    *("task", "step", "values", "zeros", "level0", "level1", "level2", "level3", "cut"),
    *("one level", "four levels", "pruned", "pruned, four levels", *(f"bits {codec}" for codec in CODECS)),
)
RUN_FIELDS = (
    *("task", "row", "policy", "steps", "workers", "parameters", "loss", "own_bits", "sum_bits", "seconds", "losses"),
)
Batches = Iterator[list[tuple[torch.Tensor, ...]]]


class Pictured:
    """ResNet-18 of a quarter of the width on CIFAR-10's first 10,000 training pictures: 4 x 16, SGD with momentum."""

    steps, looks = 100, (1, 10, 40, 95)

    def __init__(self, root: Path) -> None:
        self.pictures = Pictures(root, torch.device("cpu"), batches=1)
        self.model = ResNet18(width=16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def batches(self, rng: torch.Generator) -> Batches:
        while True:
            index = torch.randint(len(self.pictures), (WORLD, 16), generator=rng)
            yield [self.pictures.batch(own, rng) for own in index]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


class Bytes:
    """GPT of 0.9 M parameters on the first 8,000,000 bytes of enwik8: 4 x 4 texts of 128, AdamW."""

    steps, looks = 100, (1, 10, 40, 95)

    def __init__(self, root: Path) -> None:
        self.text = torch.from_numpy(data.enwik8(root)[:8_000_000])
        self.model = Gpt(256, 128, 4, 4, 128)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, rng: torch.Generator) -> Batches:
        while True:
            starts = torch.randint(len(self.text) - 129, (WORLD * 4, 1), generator=rng)
            window = self.text[starts + torch.arange(129)].long()
            yield list(zip(window[:, :-1].split(4), window[:, 1:].split(4)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


class Phrases:
    """Pretrained MiniLM (22.6 M parameters) fine-tuned on SST-2: 4 x 4 phrases of at most 32 pieces, AdamW."""

    steps, looks = 16, (1, 4, 9, 15)

    def __init__(self, root: Path) -> None:
        self.x, self.y = (torch.from_numpy(a) for a in sentences(root, "train", 32))
        self.model = Bert.pretrained(root / "minilm")
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0.01)

    def batches(self, rng: torch.Generator) -> Batches:
        while True:
            index = torch.randint(len(self.y), (WORLD, 4), generator=rng)
            yield [(self.x[own], self.y[own]) for own in index]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)


TASKS: dict[str, Callable[[Path], Any]] = {"cifar": Pictured, "enwik8": Bytes, "sst2": Phrases}


def floors_of(codec: GComp, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    if codec.mode == "near":
        return dict(gradzip.rules(optimizer, codec.ulps))
    return {p: r.reshape(-1) for p, r in gradzip.reaches(optimizer).items()} if codec.mode == "paper" else {}


def exchanged(codec: GComp, own: list[torch.Tensor], context: Context) -> tuple[torch.Tensor, int, int]:
    """The mean of flat gradients through frames of each and of their sum, and the bytes of one and of the sum's."""
    total, first = torch.zeros_like(own[0]), 0
    for gradient in own:
        frame = codec.encode(gradient, context)
        first = first or frame.numel()
        total += codec.decode(frame, context)
    context = Context(context.name, context.step, floor=context.floor, shift=WORLD.bit_length() - 1)
    frame = codec.encode(total, context)
    return codec.decode(frame, context) / WORLD, first, frame.numel()


def look(task: Any, step: int, matrices: list[nn.Parameter], own: dict[nn.Parameter, torch.Tensor]) -> dict[str, Any]:
    """A row of levels.csv, of worker 0's matrices."""
    reaches = gradzip.reaches(task.optimizer)
    counts, values = torch.zeros(4, dtype=torch.int64), sum(p.numel() for p in matrices)
    one_level = 0
    for p in matrices:
        gradient, reach = own[p].reshape(-1), reaches[p].reshape(-1)
        there = gradient.abs() >= torch.finfo(torch.float32).tiny
        level = paper_levels(gradient, reach)[there]
        counts += torch.bincount(level, minlength=4)
        one_level += int((level >= 2).sum())
    coded = int(counts.sum())
    cut = sum(6 * i * int(n) for i, n in enumerate(counts))
    zeros, whole = values - coded, FIELD * values
    ablation = {  # zeros that are not pruned carry sign, mantissa and the least level bits; all of them can be cut
        "one level": (FIELD + 1) * values - 12 * (one_level + zeros),
        "four levels": (FIELD + 2) * values - cut - 18 * zeros,
        "pruned": FIELD * coded,
        "pruned, four levels": (FIELD + 2) * coded - cut,
    }
    row = {"step": step, "values": values, "zeros": round(1 - coded / values, 5), "cut": round(cut / max(1, coded), 4)}
    row |= {f"level{i}": round(int(n) / values, 5) for i, n in enumerate(counts)}
    row |= {name: round(100 * bits / whole, 3) for name, bits in ablation.items()}
    for text in CODECS:
        codec = parse(text)
        floors = floors_of(codec, task.optimizer) if isinstance(codec, GComp) else {}
        size = 0
        for number, p in enumerate(matrices):
            context = Context(f"matrix {number}", step, world=WORLD, floor=floors.get(p))
            size += codec.encode(own[p].reshape(-1), context).numel()
        row[f"bits {text}"] = round(8 * size / values, 4)
    return row


def run(name: str, row: str, root: Path, steps: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch.manual_seed(0)
    task, rng, began = TASKS[name](root), torch.Generator().manual_seed(1), time.monotonic()
    parameters = list(task.model.parameters())
    matrices = [p for p in parameters if not small(p.shape)]
    losses, looks, sizes = [], [], [list[float](), list[float]()]
    values = sum(p.numel() for p in matrices)
    for step, batches in zip(range(steps or task.steps), task.batches(rng)):
        found = [task.loss(*batch) for batch in batches]
        grads = [torch.autograd.grad(loss, parameters) for loss in found]
        losses.append(float(torch.stack(found).detach().mean()))
        if row == "plain" and step in task.looks:
            looks.append({"task": name} | look(task, step, matrices, dict(zip(parameters, grads[0]))))
        codec = parse(POLICIES[row]) if POLICIES[row] else None
        floors = floors_of(codec, task.optimizer) if isinstance(codec, GComp) else {}
        own_bytes = sum_bytes = 0
        for number, p in enumerate(parameters):
            own = [g[number].reshape(-1) for g in grads]
            if isinstance(codec, GComp) and not small(p.shape):
                mean, first, last = exchanged(codec, own, Context(f"matrix {number}", step, floor=floors.get(p)))
                own_bytes, sum_bytes = own_bytes + first, sum_bytes + last
            else:
                mean = torch.stack(own).sum(0) / WORLD
            if row == "nudged" and step == 0:
                mean = mean * (1 + 1e-6)
            p.grad = mean.view_as(p)
        if codec is not None:
            sizes[0].append(8 * own_bytes / values)
            sizes[1].append(8 * sum_bytes / values)
        task.optimizer.step()
    bits = [f"{statistics.fmean(size):.3f}" if size else "32" for size in sizes]
    made = {
        "task": name, "row": row, "policy": POLICIES[row], "steps": len(losses), "workers": WORLD,
        "parameters": sum(p.numel() for p in parameters), "loss": f"{statistics.fmean(losses[-10:]):.6f}",
        "own_bits": bits[0], "sum_bits": bits[1], "seconds": round(time.monotonic() - began, 1),
        "losses": " ".join(f"{loss:.7f}" for loss in losses),
    }  # fmt: skip
    return made, looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", metavar="TASK")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that workers/data.py describes")
    parser.add_argument("--steps", type=int, help="fewer steps, to see whether it works; needs --results")
    parser.add_argument("--results", type=Path, default=HERE)
    options = parser.parse_args()
    if options.steps and options.results == HERE:
        parser.error("--steps needs --results: its rows do not belong into the tables")
    path = options.results / "float32.csv"
    done = set()
    if path.exists():
        with path.open(newline="") as file:
            done = {(r["task"], r["row"]) for r in csv.DictReader(file)}
    for name in TASKS:
        for row in POLICIES:
            if name.startswith(options.only) and (name, row) not in done:
                made, looks = run(name, row, options.data, options.steps)
                append(path, [made], RUN_FIELDS)
                if looks:
                    append(options.results / "levels.csv", looks, LEVEL_FIELDS)
                print({k: v for k, v in made.items() if k != "losses"}, flush=True)


if __name__ == "__main__":
    main()
