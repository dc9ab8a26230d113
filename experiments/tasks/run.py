"""Trains a small model by two optimizers with every codec; writes results.csv, a row for each run, and the tables.

Four ranks are simulated in one process: each has its own batch, its own error memory and codec state; gradients are
coded and decoded by the real codecs and averaged in the order of ranks (tests/simulated.py). The text is the standard
library's own sources, so nothing is downloaded. Rows that are there already are not run again.
"""

from __future__ import annotations

import argparse
import csv
import math
import string
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import task_tables
import torch
import torch.nn.functional as F
from torch import nn

import gradzip
from gradzip.capture import corpus
from gradzip.codecs.gcomp import GComp
from gradzip.policy import Adaptive, Policy, as_policy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))
from simulated import Workers  # noqa: E402

WORLD = 4
WARMUP = 20  # steps
WINDOW = 8  # characters that the model sees
WIDTH = 64
KINDS = (string.ascii_lowercase, string.ascii_uppercase, string.digits, " ", "\n", "()[]{}", "_.,:")  # and the rest
HELD_OUT = 1 << 16  # bytes at the end of the text, for the loss that is reported


class WindowModel(nn.Module):
    """A feed-forward network that predicts the kind of an ASCII character from the bits of the eight before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8 * WINDOW, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, len(KINDS) + 1)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """(batch, WINDOW) bytes to logits."""
        bits = (window[:, :, None] >> torch.arange(8) & 1).flatten(1).float() * 2 - 1
        x = F.relu(self.first(bits))
        logits: torch.Tensor = self.head(F.relu(self.second(x)))
        return logits


@dataclass(frozen=True)
class Task:
    optimizer: Callable[[list[nn.Parameter], bool], torch.optim.Optimizer]  # the flag: without momentum of its own
    rate: float
    batch: int  # characters per rank and step
    steps: int


def adamw(parameters: list[nn.Parameter], bare: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, weight_decay=0.01)


def momentum(parameters: list[nn.Parameter], bare: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, momentum=0.0 if bare else 0.9)


TASKS = {
    "momentum": Task(momentum, 0.01, 16, 1500),
    "adamw": Task(adamw, 5e-4, 16, 1500),
}

# What must end where plain training ends, then the others.
MUST = (
    *("gcomp:mode=lossless", "gcomp", "gcomp:ulps=256", "gcomp:ulps=65536", "gcomp:keep=7", "gcomp:mode=paper"),
    *("gcomp:keep=5,round=truncate", "cast:to=bf16", "cast:to=fp16", "powersgd:rank=4", "topk:ratio=0.05"),
    *("qsgd:bits=8", "sign"),
)
OTHERS = (
    *(
        "powersgd:rank=1",
        "powersgd:rank=4,alternate=true",
        "accordion",
        "topk:ratio=0.01",
        "topk:ratio=0.05,feedback=false",
    ),
    *("randomk:ratio=0.05", "randomblock:ratio=0.05", "threshold:value=0.001", "dgc:ratio=0.05", "dgc:ratio=0.01"),
    *("onebit", "sign:feedback=false", "qsgd:bits=4", "qsgd:bits=2", "terngrad", "terngrad:clip=2.5", "natural"),
    *("natural:bits=4", "gcomp:keep=0", "gcomp:ulps=65536,feedback=false"),
)
SEEDS = 5  # of plain training


@dataclass(frozen=True)
class Result:
    task: str
    codec: str
    seed: int
    steps: int
    loss: float  # on text that was not trained on
    bits: float  # per value of all gradients, as one rank sends them, frames and all
    seconds: float


def policy_of(spec: str, steps: int) -> Policy:
    if spec == "accordion":
        return gradzip.Accordion(low="powersgd:rank=4", high="powersgd:rank=1", window=max(1, steps // 10))
    return as_policy(spec)


@cache
def text() -> torch.Tensor:
    data = corpus(4 << 20)
    return data[data < 128]


@cache
def kinds() -> torch.Tensor:
    """The number of each character's kind."""
    numbers = [next((k for k, kind in enumerate(KINDS) if chr(c) in kind), len(KINDS)) for c in range(128)]
    return torch.tensor(numbers)


def sample(data: torch.Tensor, count: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(data.numel() - WINDOW, (count, 1), generator=rng)
    window = data[starts + torch.arange(WINDOW + 1)].long()
    return window[:, :-1], kinds()[window[:, -1]]


def floors_of(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], codecs: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What near and paper mode need for each parameter, and the codecs; lossless where nothing is known."""
    floors, chosen = dict[str, Any](), dict(codecs)
    cache: dict[tuple[str, int], Any] = {}
    for parameter, name in names.items():
        codec = gradzip.parse(codecs[name])
        if not isinstance(codec, GComp) or codec.mode not in ("near", "paper"):
            continue
        key = codec.mode, codec.ulps
        if key not in cache:
            cache[key] = gradzip.rules(optimizer, codec.ulps) if codec.mode == "near" else gradzip.reaches(optimizer)
        floor = cache[key].get(parameter)
        floors[name] = floor.reshape(-1) if isinstance(floor, torch.Tensor) else floor
        if floor is None:
            chosen[name] = "gcomp:mode=lossless"
    return floors, chosen


def run(name: str, spec: str, seed: int, steps: int | None = None) -> Result:
    """One run of a task with a codec."""
    task = TASKS[name]
    steps = steps or task.steps
    begin = time.monotonic()
    training, held_out = text().split_with_sizes([text().numel() - HELD_OUT, HELD_OUT])
    torch.manual_seed(seed)
    model = WindowModel()
    names = {p: n for n, p in model.named_parameters()}
    optimizer = task.optimizer(list(names), spec.startswith("dgc"))
    policy, workers = policy_of(spec, steps), Workers(WORLD)
    rngs = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(WORLD)]
    for step in range(steps):
        rate = task.rate * min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        gradients: dict[str, list[torch.Tensor]] = {n: [] for n in names.values()}
        for rng in rngs:
            inputs, targets = sample(training, task.batch, rng)
            loss = F.cross_entropy(model(inputs), targets)
            for parameter, gradient in zip(names, torch.autograd.grad(loss, list(names))):
                gradients[names[parameter]].append(gradient)
        options = {n: policy.option(n, p.shape).codec for p, n in names.items()}
        floors, codecs = floors_of(optimizer, names, options)
        means = workers.mean(gradients, codecs, floors)
        for parameter, n in names.items():
            parameter.grad = means[n]
            if isinstance(policy, Adaptive):
                policy.observe(n, means[n])
        optimizer.step()
        if isinstance(policy, Adaptive):
            policy.end_step([rate])
    with torch.no_grad():
        inputs, targets = sample(held_out, 1 << 14, torch.Generator().manual_seed(77))
        final = float(F.cross_entropy(model(inputs), targets))
    values = sum(p.numel() for p in names) * steps
    return Result(name, spec, seed, steps, final, workers.bits / values, time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--codecs", default=";".join(["identity", *MUST, *OTHERS]))
    parser.add_argument("--seeds", type=int, default=1, help="of each codec; plain training always has 5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = HERE / "results.csv"
    done = {(row["task"], row["codec"], int(row["seed"])) for row in task_tables.read()} if path.exists() else set()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Result)])
        if not done:
            writer.writeheader()
        for seed in range(SEEDS):
            for task in args.tasks.split(","):
                for spec in args.codecs.split(";"):
                    if (task, spec, seed) in done or (seed >= args.seeds and spec != "identity"):
                        continue
                    result = run(task, spec, seed)
                    row = asdict(result)
                    writer.writerow(row | {k: f"{row[k]:.5g}" for k in ("loss", "bits", "seconds")})
                    file.flush()
                    print(result, flush=True)
    task_tables.renew()


if __name__ == "__main__":
    main()
