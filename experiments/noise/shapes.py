"""Which shape of the grid suits optimizers without second moments: bits, and how far the noise moves their updates.

    python experiments/noise/shapes.py --data DATA --csv experiments/noise/shapes.csv

A small GPT is trained plainly by four workers with Muon or Lion. In each step the same gradients are also averaged by
`noise` with each shape, and go into a momentum of their own; nothing of that comes back to training, so that all shapes
see the same gradients. Only matrices of blocks count. `changed` is what the noise does to the update: for Muon the
squares of its change over its own, for Lion the share of signs that flip. Without a shape there are two budgets, which
say how `changed` falls with bits; `at_equal_bits` is `changed` over what no shape would have at the same bits. Below 1
is better than no shape.

Shapes: `r c` is the mean square of the row times that of the column, `root r c` its square root, of the last averaged
gradient or of the momentum; `inverse roots` is one over the diagonals of (M M')^-1/2 and (M'M)^-1/2, by which Muon's
update depends on noise in one value of the momentum M, to first order and on average over directions.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from workers import data
from workers.many import orthogonal
from workers.noise import Layout, entropy, noisy_mean, plain_mean, shape_of
from workers.optimizers import Lion
from workers.texts import Gpt

WORKERS, TEXTS, LENGTH, WIDTH, BLOCKS, HEADS = 4, 8, 64, 128, 2, 4
BUDGET, FINE = 0.01, 0.001
FIELDS = ("optimizer", "shape", "budget", "steps", "seed", "share", "own_bits", "sum_bits", "changed", "at_equal_bits")


def by_rows(x: torch.Tensor) -> torch.Tensor:
    squares = x.double().square()
    return squares.mean(1, keepdim=True) * squares.mean(0, keepdim=True)


def inverse_roots(m: torch.Tensor) -> torch.Tensor:
    u, s, v = torch.linalg.svd(m.double(), full_matrices=False)
    s = s.clamp(min=1e-6 * float(s[0]))
    rows, columns = ((w.square() / s).sum(1) for w in (u, v.T))
    return 1 / torch.outer(rows, columns)


# From the last averaged gradient and the momentum of the run itself.
SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda g, m: torch.ones_like(g),
    "r c of gradient": lambda g, m: by_rows(g),
    "root r c of gradient": lambda g, m: by_rows(g).sqrt(),
    "r c of momentum": lambda g, m: by_rows(m),
    "root r c of momentum": lambda g, m: by_rows(m).sqrt(),
    "inverse roots of momentum": lambda g, m: inverse_roots(m),
}
VARIANTS = [*((name, BUDGET) for name in SHAPES), ("none", FINE)]


class Momenta:
    """The momentum of plain training in row 0, and those with noise, one for each variant."""

    def __init__(self, layout: Layout, kind: str) -> None:
        self.kind, self.layout = kind, layout
        self.values = torch.zeros(1 + len(VARIANTS), layout.length)

    def update(self, g: torch.Tensor) -> list[torch.Tensor]:
        """Takes gradients (rows, N); the updates of each matrix, (rows, n, m)."""
        if self.kind == "Muon":
            self.values.lerp_(g, 0.05)
            return [orthogonal(x) for x in self.layout.views(torch.lerp(g, self.values, 0.95))]
        signs = [x.sign() for x in self.layout.views(torch.lerp(g, self.values, 0.9))]
        self.values.lerp_(g, 0.01)
        return signs

    def changed(self, updates: list[torch.Tensor]) -> torch.Tensor:
        moved = sum((x[1:] - x[:1]).double().square().flatten(1).sum(1) for x in updates)
        if self.kind == "Muon":
            return moved / sum(x[:1].double().square().sum() for x in updates)  # type: ignore[return-value]  # sum() may give 0
        return moved / 4 / sum(x[0].numel() for x in updates)  # type: ignore[return-value]  # sum() may give 0


def run(kind: str, seed: int, steps: int, text: torch.Tensor) -> list[dict[str, object]]:
    torch.manual_seed(seed)
    model = Gpt(256, WIDTH, BLOCKS, HEADS, LENGTH, rotary=True)
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if name.startswith("blocks.") and p.dim() == 2}
    rest = [p for name, p in named.items() if name not in matrices]
    if kind == "Muon":
        optimizers = [torch.optim.Muon(matrices.values(), lr=0.02, weight_decay=0.0), torch.optim.AdamW(rest, lr=2e-3)]
    else:
        optimizers = [Lion([*matrices.values(), *rest], lr=3e-4)]
    layout = Layout({name: tuple(p.shape) for name, p in matrices.items()}, WORKERS, torch.device("cpu"))
    momenta = Momenta(layout, kind)
    rng, found, shares = torch.Generator().manual_seed(seed), list[torch.Tensor](), list[torch.Tensor]()
    bits, last = list[torch.Tensor](), torch.zeros(layout.length)
    for step in range(steps):
        own, totals = torch.zeros(1, WORKERS, layout.length), dict.fromkeys(named, torch.zeros(()))
        for worker in range(WORKERS):
            starts = torch.randint(text.numel() - LENGTH, (TEXTS, 1), generator=rng)
            windows = text[starts + torch.arange(LENGTH + 1)].long()
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values()))))
            torch._foreach_copy_(layout.views(own[0, worker]), [gradients[name] for name in matrices])
            totals = {name: totals[name] + gradients[name] / WORKERS for name in named}
        mean = plain_mean(own)
        rows, outcomes = [mean[0]], []
        for number, (shape, budget) in enumerate(VARIANTS):
            v, budgets = torch.zeros(1, layout.length), torch.tensor([budget], dtype=torch.float64)
            momentum = momenta.values[1 + number]
            for out, g, m in zip(layout.views(v[0]), layout.views(last), layout.views(momentum)):
                out.copy_((moments := SHAPES[shape](g, m)) / moments.max().clamp(min=1e-300))
            d = shape_of(layout, v) if step else None
            outcome = noisy_mean(layout, own, d, budgets, [seed * 100 + number], step, integers=step % 20 == 0)
            outcomes.append(outcome)
            rows.append(outcome.mean[0])
        updates = momenta.update(torch.stack(rows))
        if step >= steps // 3:
            found.append(momenta.changed(updates))
            shares.append(torch.stack([outcome.error[0] / outcome.signal[0] for outcome in outcomes]))
            if step % 20 == 0:
                pairs = [(entropy(layout, o.own)[0], entropy(layout, o.sum)[0]) for o in outcomes]
                bits.append(torch.tensor(pairs))
        last = mean[0]
        for name, p in named.items():
            p.grad = totals[name]
        for optimizer in optimizers:
            optimizer.step()
    changed, share, both = (torch.stack(kept).mean(0) for kept in (found, shares, bits))
    mean_bits = both.mean(1)
    fall = float((changed[-1] / changed[0]).log() / (mean_bits[-1] - mean_bits[0]))  # of the logarithm, for each bit
    plain = changed[0] * ((mean_bits - mean_bits[0]) * fall).exp()
    return [
        {
            "optimizer": kind, "shape": name, "budget": budget, "steps": steps, "seed": seed,
            "share": f"{share[i]:.6f}", "own_bits": f"{both[i, 0]:.3f}", "sum_bits": f"{both[i, 1]:.3f}",
            "changed": f"{changed[i]:.6f}", "at_equal_bits": f"{changed[i] / plain[i]:.3f}",
        }
        for i, (name, budget) in enumerate(VARIANTS)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of enwik8")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    text = torch.from_numpy(data.enwik8(options.data)[:4_000_000].copy())
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for seed in range(options.seeds):
            for kind in ("Muon", "Lion"):
                for row in run(kind, seed, options.steps, text):
                    writer.writerow(row)
                    print("  ".join(f"{key}={row[key]}" for key in FIELDS), flush=True)


if __name__ == "__main__":
    main()
