"""GComp's exponent experiments on three training runs; writes the CSV files and README.md's tables.

1. Four gradients of a run, each coded with each other's code book: Huffman without a limit, or 8 bits and an escape.
2. Whole frames along the run: code lengths in the frame, a shared book renewed every 50 steps, the shipped prior.
3. The time to decode over the entropy of the exponents.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import speed
import stale
import tables
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

import gradzip
from gradzip import engines
from gradzip.capture import CONTEXT, VOCABULARY, ByteModel, ModelSize, corpus
from gradzip.codecs import Context, books
from gradzip.engines.layout import Job

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent.parent / "bench"))
import moments  # noqa: E402
import pictures  # noqa: E402

STEPS = 300
SAMPLES = (2, 30, 100, 300)  # the steps of S1 to S4
MEASURED = (2, *range(10, STEPS + 1, 10))
REFRESH = 50  # steps between books
INSTALL = 2  # steps until a new book is in use
SEED = 1  # the prior was made with seed 0
BATCH = 4  # sequences
LOSS_SCALE = 2.0**16  # what torch's GradScaler begins with
MODES = ("lossless", "near")


@dataclass
class Pair:
    """The book of one gradient on another. Bits per exponent, as per cent of 8."""

    run: str
    symbols: str  # raw exponents, or relative to the mean of their block
    source: str
    target: str
    native: float
    cut: float
    limited: float
    entropy: float  # of the target
    zeros: float  # share of the target's values


@dataclass
class Base:
    """What it brings to code exponents relative to their block. Bits per exponent of the last gradient of a run."""

    run: str
    entropy: float  # of raw exponents, each 16K values by themselves
    raw: float  # one table per segment
    relative: float


@dataclass
class Sizes:
    """One gradient of a run in frames of the codec: bits per value, all headers included."""

    run: str
    mode: str
    step: int
    frame: float  # code lengths in the frame
    shared: float  # a shared book, renewed every 50 steps
    prior: float  # the prior, for ever
    # GComp's way, arithmetic on raw exponents with cut codes, bits per value of the exponents alone:
    raw_static: float  # the book of the first gradient, for ever
    raw_refreshed: float
    raw_own: float  # its own book
    zeros: float


# --- Training runs -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Two LSTM layers that predict the next byte: a kind of model that the prior was not made from."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, CONTEXT) -> (batch, CONTEXT, VOCABULARY)
        logits: torch.Tensor = self.head(self.layers(self.token(tokens))[0])
        return logits


def text_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    starts = torch.randint(text.numel() - CONTEXT, (BATCH, 1))
    window = text[starts + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def transformer() -> Iterator[moments.Moment]:
    model = ByteModel(ModelSize(width=128, blocks=4, batch=BATCH))
    return moments.train(AdamW(model.parameters(), lr=1e-3), partial(text_loss, model, corpus()), STEPS)


def recurrent() -> Iterator[moments.Moment]:
    model = Recurrent()
    return moments.train(AdamW(model.parameters(), lr=2e-3), partial(text_loss, model, corpus()), STEPS)


def convolutions() -> Iterator[moments.Moment]:
    model = pictures.network()
    return moments.train(SGD(model.parameters(), lr=0.01, momentum=0.9), partial(pictures.loss, model), STEPS)


RUNS: dict[str, Callable[[], Iterator[moments.Moment]]] = {
    "transformer, AdamW": transformer,
    "LSTM, AdamW": recurrent,
    "convolutions, momentum": convolutions,
}


# --- 1: stale books ----------------------------------------------------------------------------------------------


def cross(run: str, samples: dict[str, torch.Tensor]) -> Iterator[Pair]:
    """Every sample with every sample's book, and all books on the last sample as a loss scale would make it."""
    last = list(samples)[-1]
    targets = samples | {f"{last} scaled": LOSS_SCALE * samples[last]}
    for name, histogram in (("raw", stale.raw_exponents), ("relative", stale.relative_symbols)):
        counts = {sample: histogram(gradient) for sample, gradient in targets.items()}
        for source in samples:
            for target, gradient in targets.items():
                n, there = gradient.numel(), counts[target]
                yield Pair(
                    run=run,
                    symbols=name,
                    source=source,
                    target=target,
                    native=100 / 8 * stale.mean_bits(stale.native(counts[source]), there, n),
                    cut=100 / 8 * stale.mean_bits(stale.cut(counts[source]), there, n),
                    limited=100 / 8 * stale.mean_bits(stale.limited(counts[source]), there, n),
                    entropy=100 / 8 * stale.entropy(there, n),
                    zeros=zeros(gradient),
                )


def zeros(gradient: torch.Tensor) -> float:
    return float((gradient == 0).double().mean())


def base(run: str, gradient: torch.Tensor) -> Base:
    costs = [stale.segment_bits(gradient, relative) for relative in (False, True)]
    return Base(run, stale.windowed_entropy(gradient), costs[0], costs[1])


# --- 2: books over a run -----------------------------------------------------------------------------------------


class Books:
    """The books in use while a run goes on, and those on their way."""

    def __init__(self) -> None:
        self.shared: dict[str, books.Book | None] = dict.fromkeys(MODES)  # None: the prior
        self.raw: np.ndarray | None = None
        self.raw_static: np.ndarray | None = None
        self.coming: dict[int, tuple[dict[str, books.Book], np.ndarray]] = {}  # by the step they come into use

    def before(self, step: int) -> None:
        if step in self.coming:
            made, self.raw = self.coming.pop(step)
            for mode, book in made.items():
                books.install(book)
                self.shared[mode] = book

    def renew(self, step: int, gradient: torch.Tensor, floor: torch.Tensor) -> None:
        engine = engines.pick("cpu")
        made = {}
        for mode in MODES:
            counts = engine.histogram(gradient, Job(mode), floor if mode == "near" else None)
            made[mode] = books.make(counts.sum(0))
        self.coming[step + INSTALL] = made, stale.raw_exponents(gradient)


def frames(run: str, step: int, gradient: torch.Tensor, floor: torch.Tensor, in_use: Books) -> Iterator[Sizes]:
    n, raw = gradient.numel(), stale.raw_exponents(gradient)
    if in_use.raw_static is None or in_use.raw is None:
        in_use.raw_static = in_use.raw = raw

    def exponent_bits(source: np.ndarray) -> float:
        return stale.mean_bits(stale.cut(source), raw, n)

    for mode in MODES:
        floors = floor if mode == "near" else None
        in_frame, by_id = f"gcomp:mode={mode}", f"gcomp:mode={mode},book=shared"
        yield Sizes(
            run=run,
            mode=mode,
            step=step,
            frame=frame_bits(gradient, in_frame, floors, None),
            shared=frame_bits(gradient, by_id, floors, in_use.shared[mode]),
            prior=frame_bits(gradient, by_id, floors, None),
            raw_static=exponent_bits(in_use.raw_static),
            raw_refreshed=exponent_bits(in_use.raw),
            raw_own=exponent_bits(raw),
            zeros=zeros(gradient),
        )


def frame_bits(gradient: torch.Tensor, codec: str, floor: torch.Tensor | None, book: books.Book | None) -> float:
    """Bits per value of a frame, which must decode."""
    context = Context(floor=floor, state={} if book is None else {"book": book})
    payload = gradzip.parse(codec).encode(gradient, context)
    if floor is None:
        assert torch.equal(gradzip.decode(payload).view(torch.int32), gradient.view(torch.int32))
    return 8 * payload.numel() / gradient.numel()


def follow(run: str) -> tuple[list[Pair], Base, list[Sizes]]:
    """One training run: its four samples, the last of them more closely, and all measured steps."""
    torch.manual_seed(SEED)
    samples: dict[str, torch.Tensor] = {}
    sizes: list[Sizes] = []
    in_use = Books()
    for moment in RUNS[run]():
        step = moment.step
        in_use.before(step)
        if step not in MEASURED and step % REFRESH:
            continue
        gradient = moment.gradient()
        floor = moments.flat(gradzip.floors(moment.optimizer).values())
        if step in MEASURED:
            sizes += frames(run, step, gradient, floor, in_use)
        if step % REFRESH == 0:
            in_use.renew(step, gradient, floor)
        if step in SAMPLES:
            samples[f"S{len(samples) + 1}"] = gradient
            print(f"{run}: step {step}, loss {moment.loss:.3f}", flush=True)
    return list(cross(run, samples)), base(run, gradient), sizes


def write(path: Path, rows: Sequence[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(rows[0])])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("books", "speed"), help="measure one half, keep the other's results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only != "speed":
        results = [follow(run) for run in RUNS]
        write(HERE / "stale.csv", [pair for pairs, _, _ in results for pair in pairs])
        write(HERE / "base.csv", [base for _, base, _ in results])
        write(HERE / "refresh.csv", [row for _, _, rows in results for row in rows])
    if options.only != "books":
        write(HERE / "speed.csv", speed.measure())
    tables.update()


if __name__ == "__main__":
    main()
