"""The GPT of texts.py for R runs of W workers as one model: every layer is a batched matrix product over R x W.

Runs of one stack begin with the same values and see the same batches. What they do with gradients differs. One process
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

Tensors = dict[str, torch.Tensor]


def halved(name: str) -> bool:
    """What autocast computes in bfloat16: linear layers of blocks. Embeddings and norms stay float32."""
    return name.startswith("blocks.") and ".norm" not in name


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    normal = F.layer_norm(x, x.shape[-1:])
    return torch.addcmul(bias.unsqueeze(1), normal, weight.unsqueeze(1)).to(dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def block(
    x: torch.Tensor, texts: int, heads: int, n1w: torch.Tensor, n1b: torch.Tensor, n2w: torch.Tensor, n2b: torch.Tensor,
    qkvw: torch.Tensor, qkvb: torch.Tensor, outw: torch.Tensor, outb: torch.Tensor, upw: torch.Tensor,
    upb: torch.Tensor, downw: torch.Tensor, downb: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One block for x (G, texts x length, width) and parameters (G, ...), in the order of GptBlock's."""
    group, _, width = x.shape
    mixed = _linear(_norm(x, n1w, n1b, qkvw.dtype), qkvw, qkvb).view(group * texts, -1, 3, heads, width // heads)
    q, k, v = mixed.permute(2, 0, 3, 1, 4)
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
    words, places = p["tokens.weight"], p["places.weight"]
    vocabulary, width = words.shape[1:]
    rows = tokens + vocabulary * torch.arange(group, device=tokens.device).view(-1, 1, 1)
    x = F.embedding(rows, words.reshape(group * vocabulary, width)) + places[:, None, :length]
    x = x.view(group, texts * length, width)
    names = list(p)
    blocks = [name.removesuffix(".norm1.weight") for name in names if name.endswith(".norm1.weight")]
    for name in blocks:
        x = run_block(x, texts, heads, *(p[key] for key in names if key.startswith(f"{name}.")))
    half = p[f"{blocks[0]}.qkv.weight"].dtype
    x = _norm(x, p["norm.weight"], p["norm.bias"], half)
    logits = torch.bmm(x, words.to(half).transpose(1, 2))
    loss = F.cross_entropy(logits.view(-1, vocabulary).float(), targets.reshape(-1), reduction="none")
    return loss.view(group, texts, length).mean(-1)


class Stack:
    """Parameters (R, N) of all runs, and the gradients (R, W, N) of their workers."""

    def __init__(self, model: nn.Module, runs: int, world: int, device: torch.device, heads: int, at_once: int) -> None:
        """`at_once`: runs of one forward and backward pass, as many as memory allows."""
        named = {name: p.detach() for name, p in model.named_parameters()}
        self.layout = Layout({name: tuple(p.shape) for name, p in named.items()}, world, device)
        self.runs, self.world, self.heads, self.device = runs, world, heads, device
        self.values = torch.zeros(runs, self.layout.length, device=device)
        for view, p in zip(self.layout.views(self.values), named.values()):
            view.copy_(p)
        self.gradients = torch.zeros(runs, world, self.layout.length, device=device)
        self._half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._at_once = min(at_once, runs)
        self.run_block: Callable[..., torch.Tensor] = block

    def _leaves(self, runs: slice, world: int) -> Tensors:
        """Copies (G, ...) for each worker of some runs."""
        found = {}
        for name, view in zip(self.layout.names, self.layout.views(self.values[runs])):
            copies = view.to(self._half if halved(name) else torch.float32).unsqueeze(1)
            found[name] = copies.expand(-1, world, *view.shape[1:]).reshape(-1, *view.shape[1:])
        return found

    def backward(self, window: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Gradients for windows (W, texts, length + 1); `weights` (R, texts) of texts. Mean losses (R,)."""
        means = []
        for start in range(0, self.runs, self._at_once):
            part = slice(start, min(start + self._at_once, self.runs))
            count = part.stop - part.start
            leaves = {name: leaf.requires_grad_() for name, leaf in self._leaves(part, self.world).items()}
            windows = window.expand(count, *window.shape).reshape(-1, *window.shape[1:])
            found = losses(leaves, windows, self.heads, self.run_block).view(count, self.world, -1)
            loss = (found * weights[part, None, :]).sum(-1)
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
        self.m, self.v, self.steps = torch.zeros_like(stack.values), torch.zeros_like(stack.values), 0
        matrices = [len(shape) > 1 for shape in stack.layout.shapes]
        self.decay = decay * stack.layout.each_value(torch.tensor(matrices, device=stack.device).float())

    def moments(self) -> torch.Tensor | None:
        """What shapes the grid: from the fourth step on."""
        return self.v if self.steps >= 4 else None

    def unbiased(self) -> torch.Tensor:
        return self.v / (1 - self.betas[1] ** self.steps) if self.steps else self.v

    def step(self, mean: torch.Tensor, rates: torch.Tensor) -> None:
        """`mean` (R, N), `rates` (R,)."""
        layout, values = self.stack.layout, self.stack.values
        self.steps += 1
        first, second = self.betas
        layout.in_blocks(values).mul_(1 - rates[:, None, None] * self.decay)
        self.m.lerp_(mean, 1 - first)
        self.v.mul_(second).addcmul_(mean, mean, value=1 - second)
        below = self.v.sqrt().div_(math.sqrt(1 - second**self.steps)).add_(1e-8)
        values.sub_(torch.div(self.m, below, out=below).mul_(rates[:, None] / (1 - first**self.steps)))


class Muon(Adam):
    """Muon for the matrices of blocks (momentum 0.95, Nesterov, five Newton-Schulz steps), AdamW for the rest.

    The grid of a matrix is shaped by mean squares of rows and columns of the last mean, which stand in `v`.
    """

    def __init__(self, stack: Stack, betas: tuple[float, float], decay: float, factor: float) -> None:
        super().__init__(stack, betas, decay)
        self.factor = factor  # Muon's rate over AdamW's
        layout = stack.layout
        self._mine = [t for t, name in enumerate(layout.names) if halved(name) and len(layout.shapes[t]) == 2]
        self._momentum = {t: torch.zeros_like(layout.views(stack.values)[t]) for t in self._mine}

    def step(self, mean: torch.Tensor, rates: torch.Tensor) -> None:
        layout = self.stack.layout
        before = {t: view.clone() for t, view in enumerate(layout.views(self.stack.values)) if t in self._momentum}
        super().step(mean, rates)
        values, means, moments = layout.views(self.stack.values), layout.views(mean), layout.views(self.v)
        for t in self._mine:
            g, momentum = means[t], self._momentum[t]
            momentum.lerp_(g, 0.05)
            turned = _orthogonal(torch.lerp(g, momentum, 0.95))
            scale = self.factor * max(1.0, g.shape[1] / g.shape[2]) ** 0.5
            values[t].copy_(before[t] - (rates * scale)[:, None, None] * turned)
            squared = g.square()
            moments[t].copy_(squared.mean(2, keepdim=True) * squared.mean(1, keepdim=True))


def _orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon's author for (R, rows, columns)."""
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
