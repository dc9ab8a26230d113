"""Real gradients to look at, made on the spot: a small language model learns the sources of Python's own library.

Nothing is downloaded. The model is a byte-level transformer, trained by AdamW with warm-up and cosine decay; at given
points of the run its gradients, parameters and optimizer state are kept as a Snapshot, taken between backward and
step, where a gradient exchange would meet them.
"""

from __future__ import annotations

import math
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from .errors import Unsupported

CACHE_VERSION = 1  # part of the cache's file name; raise it when a change here changes the gradients
CONTEXT = 128  # bytes that the model sees at once
VOCABULARY = 256
HEAD_WIDTH = 32
PEAK_LR = 1e-3
FINAL_LR = 0.1  # of the peak
CORPUS_BYTES = 8 << 20


@dataclass(frozen=True)
class ModelSize:
    width: int  # a multiple of HEAD_WIDTH
    blocks: int
    batch: int  # sequences per step

    @property
    def parameters(self) -> int:
        per_block = 12 * self.width**2 + 13 * self.width
        return self.blocks * per_block + (2 * VOCABULARY + CONTEXT) * self.width + 2 * self.width


DEMO = ModelSize(width=192, blocks=6, batch=4)  # 2.8 M parameters, 11 MB of gradients: hundreds of steps in a minute
BENCH = ModelSize(width=320, blocks=8, batch=4)  # 10.1 M parameters, 40 MB of gradients
BENCH_STEPS = 120  # about a minute on two cores


@dataclass(frozen=True)
class Snapshot:
    """One moment of a training run, between backward and step. All tensors are flat float32, in parameter order."""

    step: int  # the step about to be taken, from 1
    loss: float
    lr: float
    gradient: torch.Tensor
    theta: torch.Tensor
    first: torch.Tensor  # AdamW's exp_avg
    second: torch.Tensor  # AdamW's exp_avg_sq

    def optimizer(self) -> torch.optim.AdamW:
        """AdamW about to take this step, on one flat parameter: element by element the run's own optimizer."""
        parameter = nn.Parameter(self.theta.clone())
        parameter.grad = self.gradient.clone()
        optimizer = torch.optim.AdamW([parameter], lr=self.lr)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(self.step - 1)),
            "exp_avg": self.first.clone(),
            "exp_avg_sq": self.second.clone(),
        }
        return optimizer


@dataclass(frozen=True)
class Progress:
    """What `train` tells after every step."""

    step: int
    fraction: float  # of the run, 0 to 1
    loss: float
    lr: float


def train(
    size: ModelSize,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    at: Sequence[float] = (0.1, 0.5, 1.0),
    seed: int = 0,
    on_step: Callable[[Progress], None] | None = None,
) -> list[Snapshot]:
    """Trains for so many steps or seconds and returns a snapshot at each fraction `at` of the run.

    The caller's random state is left as it was. The first step has no optimizer state yet and is never captured.
    """
    if (steps is None) == (seconds is None):
        raise Unsupported("train() wants either steps= or seconds=")
    if steps is not None and steps < 1 + len(at):
        raise Unsupported(f"{len(at)} snapshots need a run of at least {1 + len(at)} steps, not {steps}")
    if seconds is not None and not seconds > 0:
        raise Unsupported(f"seconds={seconds}: train for some time")
    if not at or list(at) != sorted(set(at)) or not 0 < at[0] <= at[-1] <= 1:
        raise Unsupported(f"at={tuple(at)}: give rising fractions of the run, above 0 and up to 1")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        return _train(size, steps, seconds, list(at), on_step)


def _train(
    size: ModelSize,
    steps: int | None,
    seconds: float | None,
    at: list[float],
    on_step: Callable[[Progress], None] | None,
) -> list[Snapshot]:
    text = corpus()
    model = ByteModel(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    snapshots: list[Snapshot] = []
    start, step, fraction = time.monotonic(), 0, 0.0
    while len(snapshots) < len(at):
        step += 1
        if steps is not None:
            fraction = step / steps
        elif seconds is not None:
            # A run by the clock lasts at least as many steps as it takes to have something to capture.
            fraction = min(1.0, (time.monotonic() - start) / seconds) if step > len(at) else 0.0
        lr = learning_rate(step, fraction)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = batch(text, size.batch)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step > 1 and fraction >= at[len(snapshots)]:
            snapshots.append(snapshot(step, loss.item(), lr, optimizer))
        optimizer.step()
        if on_step is not None:
            on_step(Progress(step, fraction, loss.item(), lr))
    return snapshots


def learning_rate(step: int, fraction: float) -> float:
    """Warm-up over 20 steps, then a cosine over the run."""
    return PEAK_LR * min(1.0, step / 20) * (FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * fraction)) / 2)


def snapshot(step: int, loss: float, lr: float, optimizer: torch.optim.AdamW) -> Snapshot:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    return Snapshot(
        step,
        loss,
        lr,
        gradient=flat([p.grad for p in parameters]),
        theta=flat(parameters),
        first=flat([optimizer.state[p]["exp_avg"] for p in parameters]),
        second=flat([optimizer.state[p]["exp_avg_sq"] for p in parameters]),
    )


# -- text ------------------------------------------------------------------------------------------------------------


def corpus(limit: int = CORPUS_BYTES) -> torch.Tensor:
    """The first `limit` bytes of the standard library's sources, in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(library.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= limit:
            break
    if len(data) <= 1 << 16:
        raise Unsupported(f"{library} holds too few Python sources to train on: use a Python that ships them")
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


def batch(
    text: torch.Tensor, sequences: int, rng: torch.Generator | None = None, length: int = CONTEXT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of at most CONTEXT bytes from random places, and what follows each of them."""
    starts = torch.randint(text.numel() - length, (sequences, 1), generator=rng)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


# -- model -----------------------------------------------------------------------------------------------------------


class ByteModel(nn.Module):
    """A plain pre-norm transformer that predicts the next byte."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.Sequential(*(_Block(size.width) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, length) -> (batch, length, VOCABULARY)
        x: torch.Tensor = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width) -> the same
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.contract(F.gelu(self.expand(self.feed_norm(x))))
        return result


# -- cache -----------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradzip"


def cached(
    size: ModelSize = BENCH, steps: int = BENCH_STEPS, on_step: Callable[[Progress], None] | None = None
) -> Snapshot:
    """The last snapshot of such a run, from the cache if it was made before."""
    shape = f"{size.width}x{size.blocks}x{size.batch}"
    path = cache_dir() / f"capture-v{CACHE_VERSION}-{shape}-{steps}.pt"
    if path.exists():
        return Snapshot(**torch.load(path, weights_only=True))
    snapshot = train(size, steps=steps, at=(1.0,), on_step=on_step)[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(vars(snapshot), unfinished)
    unfinished.replace(path)  # at once: whoever runs at the same time sees all of the file or none
    return snapshot
