"""The GPT of texts.py for R runs of W workers as one model: every layer is a batched matrix product over R x W.

Runs of one seed begin with the same values and see the same batches. What they do with gradients differs. One process
keeps a GPU busy this way, and each worker's gradient comes out of one backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .noise import Layout
from .row_optimizer import RowOptimizer
from .texts import rotated

Tensors = dict[str, torch.Tensor]
EPSILON = 1e-8  # of AdamW


def halved(name: str) -> bool:
    """What autocast computes in bfloat16: linear layers of blocks. Embeddings and norms stay float32."""
    return name.startswith("blocks.") and ".norm" not in name


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    normal = F.layer_norm(x, x.shape[-1:])
    return torch.addcmul(bias.unsqueeze(1), normal, weight.unsqueeze(1)).to(dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def block(
    x: torch.Tensor, texts: int, heads: int, rotary: bool, n1w: torch.Tensor, n1b: torch.Tensor, n2w: torch.Tensor,
    n2b: torch.Tensor, qkvw: torch.Tensor, qkvb: torch.Tensor, outw: torch.Tensor, outb: torch.Tensor,
    upw: torch.Tensor, upb: torch.Tensor, downw: torch.Tensor, downb: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One block for x (G, texts x length, width) and parameters (G, ...), in the order of GptBlock's."""
    group, _, width = x.shape
    mixed = _linear(_norm(x, n1w, n1b, qkvw.dtype), qkvw, qkvb).view(group * texts, -1, 3, heads, width // heads)
    q, k, v = mixed.permute(2, 0, 3, 1, 4)
    if rotary:
        q, k = rotated(q), rotated(k)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + _linear(seen.transpose(1, 2).reshape(group, -1, width), outw, outb)
    inner = F.gelu(_linear(_norm(x, n2w, n2b, upw.dtype), upw, upb))
    return x + _linear(inner, downw, downb)


def losses(
    p: Tensors, window: torch.Tensor, heads: int, run_block: Callable[..., torch.Tensor] = block
) -> torch.Tensor:
    """(G, texts) mean losses of windows (G, texts, length + 1) under parameters (G, ...)."""
    tokens, targets = window[..., :-1], window[..., 1:]
    group, texts, length = tokens.shape
    words = p["tokens.weight"]
    vocabulary, width = words.shape[1:]
    rows = tokens + vocabulary * torch.arange(group, device=tokens.device).view(-1, 1, 1)
    x = F.embedding(rows, words.reshape(group * vocabulary, width))
    rotary = "places.weight" not in p
    if not rotary:
        x = x + p["places.weight"][:, None, :length]
    x = x.view(group, texts * length, width)
    names = list(p)
    blocks = [name.removesuffix(".norm1.weight") for name in names if name.endswith(".norm1.weight")]
    for name in blocks:
        x = run_block(x, texts, heads, rotary, *(p[key] for key in names if key.startswith(f"{name}.")))
    half = p[f"{blocks[0]}.qkv.weight"].dtype
    x = _norm(x, p["norm.weight"], p["norm.bias"], half)
    logits = torch.bmm(x, words.to(half).transpose(1, 2))
    loss = F.cross_entropy(logits.view(-1, vocabulary).float(), targets.reshape(-1), reduction="none")
    return loss.view(group, texts, length).mean(-1)


class Stack:
    """Parameters (R, N) of all runs, and the gradients (R, W, N) of their workers."""

    def __init__(self, models: Sequence[nn.Module], world: int, device: torch.device, heads: int, at_once: int) -> None:
        """`models`: what each run begins with. `at_once`: runs of one forward and backward pass."""
        shapes = {name: tuple(p.shape) for name, p in models[0].named_parameters()}
        self.layout = Layout(shapes, world, device)
        self.runs, self.world, self.heads, self.device = len(models), world, heads, device
        self.values = torch.zeros(self.runs, self.layout.length, device=device)
        for values, model in zip(self.values, models):
            for view, p in zip(self.layout.views(values), model.parameters()):
                view.copy_(p.detach())
        self.gradients = torch.zeros(self.runs, world, self.layout.length, device=device)
        self._half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._at_once = min(at_once, self.runs)
        self.run_block: Callable[..., torch.Tensor] = block

    def _leaves(self, runs: slice, world: int) -> Tensors:
        """What each worker of some runs computes with: views (G, ...) of one copy for each type."""
        copies = {}
        for dtype in {self._half, torch.float32}:
            flat = self.values[runs].to(dtype).unsqueeze(1)
            copies[dtype] = self.layout.views(flat.expand(-1, world, -1).reshape(-1, self.layout.length))
        return {
            name: copies[self._half if halved(name) else torch.float32][t].detach()
            for t, name in enumerate(self.layout.names)
        }

    def backward(self, windows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Gradients for windows (R, W, texts, length + 1); `weights` (R, texts) of texts. Mean losses (R,)."""
        means = []
        for start in range(0, self.runs, self._at_once):
            part = slice(start, min(start + self._at_once, self.runs))
            count = part.stop - part.start
            leaves = {name: leaf.requires_grad_() for name, leaf in self._leaves(part, self.world).items()}
            found = losses(leaves, windows[part].flatten(0, 1), self.heads, self.run_block)
            loss = (found.view(count, self.world, -1) * weights[part, None, :]).sum(-1)
            gradients = torch.autograd.grad(loss.sum(), list(leaves.values()))
            views = self.layout.views(self.gradients[part])
            torch._foreach_copy_(views, [g.view(v.shape) for g, v in zip(gradients, views)])
            means.append(loss.detach().mean(1))
        return torch.cat(means)

    @torch.no_grad()
    def evaluate(self, windows: torch.Tensor, at_once: int) -> torch.Tensor:
        """(R,) mean losses of windows (n, length + 1)."""
        total = torch.zeros(self.runs, dtype=torch.float64, device=self.device)
        leaves = self._leaves(slice(0, self.runs), 1)
        for part in windows.split(at_once):
            found = losses(leaves, part.expand(self.runs, *part.shape), self.heads)
            total += found.sum(1, dtype=torch.float64)
        return total / len(windows)


class Adam:
    """AdamW as torch's, with a rate for each run."""

    def __init__(self, stack: Stack, betas: tuple[float, float], decay: float) -> None:
        self.stack, self.betas = stack, betas
        self._decay = decay
        self.m, self.v, self.steps = torch.zeros_like(stack.values), torch.zeros_like(stack.values), 0
        matrices = [len(shape) > 1 for shape in stack.layout.shapes]
        self.decay = decay * stack.layout.each_value(torch.tensor(matrices, device=stack.device).float())

    def moments(self) -> torch.Tensor | None:
        """What shapes the grid: from the fourth step on."""
        return self.v if self.steps >= 4 else None

    def unbiased(self) -> torch.Tensor:
        return self.v / (1 - self.betas[1] ** self.steps) if self.steps else self.v

    def row_optimizer(self, run: int) -> RowOptimizer:
        """What answers for a run where torch's AdamW is asked."""
        state = {"exp_avg": self.m[run], "exp_avg_sq": self.v[run]}
        settings = {"betas": self.betas, "eps": EPSILON}
        return RowOptimizer(
            self.stack.layout, torch.optim.AdamW, self.stack.values[run], state, self._decay, **settings
        )

    def step(self, mean: torch.Tensor, rates: torch.Tensor) -> None:
        """`mean` (R, N), `rates` (R,)."""
        layout, values = self.stack.layout, self.stack.values
        self.steps += 1
        first, second = self.betas
        layout.in_blocks(values).mul_(1 - rates[:, None, None] * self.decay)
        self.m.lerp_(mean, 1 - first)
        self.v.mul_(second).addcmul_(mean, mean, value=1 - second)
        below = self.v.sqrt().div_(math.sqrt(1 - second**self.steps)).add_(EPSILON)
        values.sub_(torch.div(self.m, below, out=below).mul_(rates[:, None] / (1 - first**self.steps)))


class Muon(Adam):
    """Muon for the matrices of blocks (momentum 0.95, Nesterov, five Newton-Schulz steps), AdamW for the rest.

    The grid of a matrix is shaped by mean squares of its rows and columns, which stand in `v`: those of the last mean,
    or of the momentum for the runs that ask for it.
    """

    def __init__(
        self, stack: Stack, betas: tuple[float, float], decay: float, factor: float, by_momentum: Sequence[bool]
    ) -> None:
        super().__init__(stack, betas, decay)
        self.factor = factor  # Muon's rate over AdamW's
        self._by_momentum = torch.tensor(by_momentum, device=stack.device).view(1, -1, 1, 1)
        layout, kinds = stack.layout, dict[tuple[int, ...], list[int]]()
        for t, (name, shape) in enumerate(zip(layout.names, layout.shapes)):
            if halved(name) and len(shape) == 2:
                kinds.setdefault(shape, []).append(t)
        # Matrices of one shape are turned together: (matrices, R, rows, columns).
        self._kinds = list(kinds.values())
        self._momentum = [torch.zeros(len(k), stack.runs, *layout.shapes[k[0]], device=stack.device)
                          for k in self._kinds]  # fmt: skip

    def row_optimizer(self, run: int) -> RowOptimizer:
        raise ValueError("near and paper mode know no bound on a step of Muon: everything would go lossless")

    def step(self, mean: torch.Tensor, rates: torch.Tensor) -> None:
        layout = self.stack.layout
        values, means, moments = (layout.views(flat) for flat in (self.stack.values, mean, self.v))
        before = [torch.stack([values[t] for t in kind]) for kind in self._kinds]
        super().step(mean, rates)
        for kind, old, momentum in zip(self._kinds, before, self._momentum):
            g = torch.stack([means[t] for t in kind])
            momentum.lerp_(g, 0.05)
            turned = orthogonal(torch.lerp(g, momentum, 0.95).flatten(0, 1)).view(g.shape)
            scale = self.factor * max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5
            new = old - (rates * scale)[:, None, None] * turned
            squared = torch.where(self._by_momentum, momentum, g).square()
            product = squared.mean(-1, keepdim=True) * squared.mean(-2, keepdim=True)
            torch._foreach_copy_([values[t] for t in kind], list(new))
            torch._foreach_copy_([moments[t] for t in kind], list(product))


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon's author for (n, rows, columns)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if turned else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x.transpose(1, 2) if turned else x).float()


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """`block` through torch.compile: fewer passes over memory, for some 20 seconds of compiling."""
    made: Any = torch.compile(block, dynamic=False, fullgraph=True)
    return made  # type: ignore[no-any-return]


def rates_at(step: int, totals: Sequence[int], peaks: Sequence[float], warm: float = 0.1) -> list[float]:
    """A linear rise to each run's peak and fall to 0; 0 for runs that are over."""
    found = []
    for total, peak in zip(totals, peaks):
        done = step / total
        found.append(peak * max(0.0, min(done / warm, (1 - done) / (1 - warm))))
    return found
