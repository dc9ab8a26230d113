"""Makes the shipped code book, src/gradzip/codecs/prior.py, from real gradients: `python bench/make_prior.py`.

Early, middle and late gradients of a byte-level transformer under AdamW and of a small convolutional net under AdamW
and SGD with momentum; each as it is (lossless) and in near mode at 1 and at 256 ulps, the last of which makes zeros.
Every one of these has the same weight, however many values it has. A symbol gets a code if any of them would give it
one: a book that is to serve unseen gradients must not be surprised by what another kind of model does all the time.

About two minutes on one core. The gradients, and with them perhaps a length or two, depend on torch and on the
machine: a new file is a new book 1, that is, a change of the format.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import moments
import numpy as np
import pictures
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import gradzip
from gradzip import capture, engines
from gradzip.engines import huffman
from gradzip.engines.layout import ESCAPE, Job

TARGET = Path(__file__).parent.parent / "src/gradzip/codecs/prior.py"
FRACTIONS = (0.05, 0.3, 1.0)
STEPS = 200
WEIGHT = 1 << 20  # of each histogram


def histograms() -> Iterator[tuple[str, np.ndarray]]:
    """Symbol counts (256,) of every gradient in all modes, each with what it is of."""
    for snapshot in capture.train(capture.DEMO, steps=STEPS, at=FRACTIONS):
        yield from _modes(f"transformer, AdamW, step {snapshot.step}", snapshot.gradient, snapshot.optimizer())
    picked = {max(2, round(STEPS * fraction)) for fraction in FRACTIONS}
    runs: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
        "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
        "momentum": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    }
    for name, make in runs.items():
        torch.manual_seed(0)
        model = pictures.network()
        for moment in moments.train(make(model.parameters()), partial(pictures.loss, model), STEPS):
            if moment.step in picked:
                yield from _modes(f"convolutions, {name}, step {moment.step}", moment.gradient(), moment.optimizer)


def _modes(name: str, gradient: torch.Tensor, optimizer: Optimizer) -> Iterator[tuple[str, np.ndarray]]:
    engine = engines.pick("cpu")
    yield f"{name}, lossless", engine.histogram(gradient, Job("lossless")).sum(0).numpy()
    for ulps in (1, 256):
        floor = moments.flat(gradzip.floors(optimizer, ulps=ulps).values())
        yield f"{name}, near, {ulps} ulps", engine.histogram(gradient, Job("near"), floor).sum(0).numpy()


def prior(counts: list[np.ndarray]) -> np.ndarray:
    """Code lengths (256,) for the mean of the histograms."""
    coded = np.any([huffman.code_lengths(c) > 0 for c in counts], axis=0)
    mean = np.mean([c * WEIGHT / c.sum() for c in counts], axis=0)
    items = [(max(1, round(mean[s])), int(s)) for s in np.flatnonzero(coded)]
    items.append((max(1, round(mean[~coded].sum())), ESCAPE))
    lengths = np.zeros(256, np.uint8)
    for symbol, length in huffman.package_merge(items, huffman.MAX_LENGTH).items():
        if symbol != ESCAPE:
            lengths[symbol] = length
    return lengths


def cost(lengths: np.ndarray, counts: np.ndarray) -> float:
    """Mean bits per symbol of a histogram under a book, escapes with their raw byte."""
    escape = huffman.escape_length(lengths) + 8
    return float((np.where(lengths > 0, lengths, escape) * counts).sum() / counts.sum())


def text(lengths: np.ndarray) -> str:
    rows = "\n".join("    " + ", ".join(map(str, lengths[at : at + 32])) + "," for at in range(0, 256, 32))
    doc = '"""Code lengths of the prior book. Made by bench/make_prior.py: do not edit."""'
    return f"{doc}\n\nPRIOR_LENGTHS = [\n{rows}\n]  # fmt: skip\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    sources = list(histograms())
    lengths = prior([counts for _, counts in sources])
    out.write_text(text(lengths))
    print(f"{'bits per exponent':48} prior   own code   escapes")
    for name, counts in sources:
        own = cost(huffman.code_lengths(counts), counts)
        escapes = counts[lengths == 0].sum() / counts.sum()
        print(f"{name:48} {cost(lengths, counts):5.3f}   {own:8.3f}   {escapes:7.3%}")


if __name__ == "__main__":
    main()
