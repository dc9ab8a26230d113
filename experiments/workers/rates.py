"""What gradients look like during training, and what each mode of gcomp makes of them: GComp's Figures 2, 3, 9, 12, 14.

Looked at are the matrices of worker 0's gradient, before anything is done to it. Vectors and tiny tensors are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradzip
from gradzip.codecs import Context, parse
from gradzip.codecs.gcomp import GComp, paper_levels
from gradzip.exchange.flattening import flatten
from gradzip.policy import small

from .stacked import StackedWorkers
from .tasks import Task

sys.path.insert(0, str(Path(__file__).parent.parent / "exponents"))
import stale

CODECS = ("gcomp:mode=lossless", "gcomp", "gcomp:ulps=256", "gcomp:ulps=65536", "gcomp:keep=7", "gcomp:mode=paper")
EARLY = (1, 2, 5, 10, 20, 50)  # steps looked at, besides LATE evenly spread ones
LATE = 12
SAMPLES = (0.05, 0.35, 0.65, 0.95)  # of training: S1 to S4
SAMPLED = 1 << 20  # values of each

RATE_FIELDS = (
    *("task", "seed", "step", "epoch", "values", "zeros", "top15", "top", "magnitude", "level0", "level1", "level2"),
    *("level3", *(f"bits {codec}" for codec in CODECS)),
)
STALE_FIELDS = ("task", "seed", "symbols", "source", "target", "entropy", "native", "cut", "limited")
_CODES = (stale.native, stale.cut, stale.limited)


class Rates:
    """Looks at some steps; `found` are the rows of rates.csv and stale.csv."""

    def __init__(self, task: Task, name: str, seed: int) -> None:
        self._task, self._name, self._seed = task, name, seed
        self._matrices = [(n, p) for n, p in task.model.named_parameters() if not small(p.shape)]
        total = task.epochs * task.steps
        self._steps = {step for step in EARLY if step < total} | {total * i // LATE for i in range(LATE)}
        self._sampled = {int(total * part): f"S{number}" for number, part in enumerate(SAMPLES, 1)}
        self.rows: list[dict[str, Any]] = []
        self.samples: dict[str, dict[str, np.ndarray]] = {}

    @torch.no_grad()
    def look(self, workers: StackedWorkers, step: int) -> None:
        if step in self._steps:
            self.rows.append(self._row(workers, step))
        if step in self._sampled:
            parts = [workers.rows[0][i].reshape(-1) for i in self._places()]
            flat = torch.cat(parts)
            every = max(1, flat.numel() // SAMPLED)
            blocks = flat[: flat.numel() // 4096 * 4096].view(-1, 4096)[::every].reshape(-1).cpu()
            counts = {"raw": stale.raw_exponents(blocks), "relative": stale.relative_symbols(blocks)}
            self.samples[self._sampled[step]] = counts

    def _places(self) -> list[int]:
        wanted = {name for name, _ in self._matrices}
        return [i for i, (name, _) in enumerate(self._task.model.named_parameters()) if name in wanted]

    def _row(self, workers: StackedWorkers, step: int) -> dict[str, Any]:
        gradients = {name: workers.rows[0][i].reshape(-1) for i, (name, _) in zip(self._places(), self._matrices)}
        exponents = torch.zeros(256, dtype=torch.int64)
        for gradient in gradients.values():
            fields = (gradient.view(torch.int32) >> 23) & 255
            exponents += torch.bincount(fields, minlength=256).cpu()
        values = int(exponents.sum())
        order = exponents.argsort(descending=True)
        theta = torch.cat([p.detach().reshape(-1).abs() for _, p in self._matrices])
        g = torch.cat([gradients[name].abs() for name, _ in self._matrices])
        both = (g > 0) & (theta > 0)
        ratio = float((g[both] / theta[both]).log10().median()) if bool(both.any()) else float("nan")
        row = {
            "task": self._name, "seed": self._seed, "step": step, "epoch": round(step / self._task.steps, 3),
            "values": values, "zeros": round(int(exponents[0]) / values, 5),
            "top15": round(float(exponents[order[:15]].sum()) / values, 5),
            "top": " ".join(map(str, order[:15].tolist())), "magnitude": round(10**ratio, 9),
        }  # fmt: skip
        row |= {f"level{i}": round(share, 5) for i, share in enumerate(self._levels(gradients, values))}
        return row | {f"bits {codec}": self._bits(codec, gradients, values, step) for codec in CODECS}

    def _levels(self, gradients: dict[str, torch.Tensor], values: int) -> list[float]:
        """The parts of the values that GComp's rule cuts by 0, 6, 12 and 18 bits."""
        reaches, counts = gradzip.reaches(self._task.optimizer), torch.zeros(4, dtype=torch.int64)
        for name, parameter in self._matrices:
            gradient = gradients[name]
            reach = flatten(reaches[parameter], parameter) if parameter in reaches else torch.zeros_like(gradient)
            there = gradient.abs() >= torch.finfo(torch.float32).tiny  # the rest is coded as zero
            counts += torch.bincount(paper_levels(gradient, reach)[there], minlength=4).cpu()
        return [float(count) / values for count in counts]

    def _bits(self, text: str, gradients: dict[str, torch.Tensor], values: int, step: int) -> float:
        """Per value, in real frames."""
        codec = parse(text)
        assert isinstance(codec, GComp)
        floors: dict[torch.Tensor, Any] = {}
        if codec.mode == "near":
            floors = dict(gradzip.rules(self._task.optimizer, codec.ulps))
        elif codec.mode == "paper":
            floors = {p: flatten(r, p) for p, r in gradzip.reaches(self._task.optimizer).items()}
        total = 0
        for name, parameter in self._matrices:
            floor = floors.get(parameter)
            known = floor is not None or codec.mode not in ("near", "paper")
            used = codec if known else parse("gcomp:mode=lossless")
            total += used.encode(gradients[name], Context(name, step, floor=floor)).numel()
        return round(8 * total / values, 4)

    def found(self) -> list[tuple[str, tuple[str, ...], list[dict[str, Any]]]]:
        rows = []
        for symbols in ("raw", "relative"):
            for source, own in self.samples.items():
                for target, others in self.samples.items():
                    names = {"symbols": symbols, "source": source, "target": target}
                    rows.append(
                        {"task": self._name, "seed": self._seed} | names | _costs(own[symbols], others[symbols])
                    )
        return [("rates.csv", RATE_FIELDS, self.rows), ("stale.csv", STALE_FIELDS, rows)]


def _costs(source: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Bits per exponent, as per cent of 8, of one sample under codes made from another."""
    values = int(target.sum())
    costs = {code.__name__: stale.mean_bits(code(source), target, values) for code in _CODES}
    return {
        name: round(100 * bits / 8, 3) for name, bits in (costs | {"entropy": stale.entropy(target, values)}).items()
    }
