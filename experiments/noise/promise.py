"""What the codec noise promises, measured: a language model trained by four real ranks, once for each optimizer.

    gradzip emulate --gpu-share --no-measure --hosts 4 --rate 10gbit -- python experiments/noise/promise.py \\
        --csv experiments/noise/promise.csv
    gradzip emulate --no-limit --hosts 4 -- python experiments/noise/promise.py --steps 20 --csv somewhere.csv

For each optimizer a GPT of 10.7 M parameters is trained on bytes of text. Then gradients are averaged 200 times without
a step between, and the last steps are trained once more from a checkpoint. Rows that the file has already are not run
again. The columns:

| column | what |
|---|---|
| texts, length | texts of a rank in a step, and bytes of each |
| share, worst | of the noise in the averaged gradient, as `stats()` has it: the mean over steps, and the worst step |
| true_share, true_worst | the same in every tenth step, from the gradients of all ranks in float32 |
| ratio, bits | bytes of float32 values over those sent, padding included; bits a value of what was sent |
| coarser | frames that did not fit their slot, of all ranks |
| shaped | tensors whose grid is shaped by the optimizer's state |
| differing | replicas whose parameters differ from rank 0's in the end |
| resumed | 1: parameters are bit-identical when training goes on from a checkpoint |
| bias | squares of the mean error of the draws, over what is expected of unbiased ones: 1 but for chance... |
| bias_error | ...which is this much (a standard error) |
| shrink | the mean error along the gradient, over its standard error |
| loss, ms | of the last tenth of training; the median step on rank 0 |
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradzip
from gradzip import capture

sys.path.insert(0, str(Path(__file__).parents[1]))
from series import append, read
from workers import data
from workers.optimizers import Lion
from workers.texts import Gpt

Parameters = list[nn.Parameter]
WARM, RESUMED, PROBED = 50, 10, 10  # steps until the rate is there; trained once more; between two true shares
FIELDS = (
    *(
        "optimizer",
        "codec",
        "ranks",
        "steps",
        "parameters",
        "texts",
        "length",
        "share",
        "worst",
        "true_share",
        "true_worst",
        "ratio",
    ),
    *("bits", "coarser", "shaped", "differing", "resumed", "draws", "bias", "bias_error", "shrink", "loss", "ms"),
    *("runner", "device"),
)
KEY = (*FIELDS[:7], "device")


def muon(matrices: Parameters, rest: Parameters) -> list[Optimizer]:
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(rest, lr=1e-3)]


# Of the matrices of blocks, and of all other parameters.
OPTIMIZERS: dict[str, Callable[[Parameters, Parameters], list[Optimizer]]] = {
    "AdamW": lambda matrices, rest: [torch.optim.AdamW([*matrices, *rest], lr=1e-3)],
    "AdamW beta2=0.95": lambda matrices, rest: [torch.optim.AdamW([*matrices, *rest], lr=1e-3, betas=(0.9, 0.95))],
    "SGD": lambda matrices, rest: [torch.optim.SGD([*matrices, *rest], lr=0.05, momentum=0.9)],
    "Lion": lambda matrices, rest: [Lion([*matrices, *rest], lr=2e-4)],
    "Muon": muon,
    "Adafactor": lambda matrices, rest: [torch.optim.Adafactor([*matrices, *rest], lr=1e-2)],
}


class Training:
    """A model with its optimizers and its handle."""

    def __init__(self, kind: str, options: argparse.Namespace, device: torch.device, text: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.options, self.device, self.text = options, device, text
        net = Gpt(256, options.width, options.blocks, options.heads, options.length, rotary=True).to(device)
        self.model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        matrices = [p for name, p in net.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        inside = {id(p) for p in matrices}
        self.optimizers = OPTIMIZERS[kind](matrices, [p for p in net.parameters() if id(p) not in inside])
        self.peaks = [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]
        self.handle = gradzip.attach(self.model, self.optimizers, options.codec)

    def loss(self, step: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        starts = torch.randint(self.text.numel() - self.options.length, (self.options.texts, 1), generator=rng)
        windows = self.text[starts + torch.arange(self.options.length + 1)].long().to(self.device)
        # Attention by plain products, whose backward pass has the same bits every time.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cuda", torch.bfloat16, self.device.type == "cuda"):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def step(self, step: int) -> torch.Tensor:
        done = step / self.options.steps
        for optimizer, peak in zip(self.optimizers, self.peaks):
            optimizer.param_groups[0]["lr"] = peak * min((step + 1) / WARM, 1 - 0.9 * done)
            optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]

    def saved(self) -> dict[str, Any]:
        states = {"model": self.model.module.state_dict(), "handle": self.handle.state_dict()}
        return copy.deepcopy(states | {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]})

    def load(self, saved: dict[str, Any]) -> None:
        self.model.module.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        self.handle.load_state_dict(saved["handle"])


class TrueMeans:
    """Keeps what each rank hands over for averaging, and compares it with what came back."""

    def __init__(self, handle: Any) -> None:
        self.active, self._kept, self._reduce = False, list[tuple[list[torch.Tensor], torch.Tensor]](), handle.reduce
        handle.reduce = self._reduced

    def _reduced(self, bucket: Any) -> Any:
        if self.active:
            self._kept.append((bucket.parameters(), bucket.buffer().clone()))
        return self._reduce(bucket)

    def share(self) -> float:
        """Of the noise in the gradients of this step."""
        noise = squares = torch.zeros((), dtype=torch.float64)
        for parameters, own in self._kept:
            dist.all_reduce(own)
            own /= dist.get_world_size()
            gradients = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
            noise = noise + (gradients - own).double().square().sum().cpu()
            squares = squares + own.double().square().sum().cpu()
        self._kept.clear()
        return float(noise / squares)


class Given(nn.Module):
    """A model whose gradients are what it is given."""

    def __init__(self, gradients: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._gradients = list(gradients.values())
        for name, gradient in gradients.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros_like(gradient)))

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), self._gradients)]).sum()


def draws(training: Training, count: int) -> dict[str, Any]:
    """Averages one step's gradients again and again, with the shapes that training has come to."""
    with training.model.no_sync():
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.loss(10**6).backward()
    named = dict(training.model.module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    given = Given(gradients)
    places = {id(p): twin for p, twin in zip(named.values(), given.parameters())}
    optimizers = copy.deepcopy(training.optimizers, memo=places)  # steps nothing: it holds the state that shapes grids
    model = DistributedDataParallel(given, gradient_as_bucket_view=True)
    handle = gradzip.attach(model, optimizers, training.options.codec)
    exact = []
    for gradient in gradients.values():
        total = gradient.double()
        dist.all_reduce(total)
        exact.append(total / dist.get_world_size())
    squares = sum(float(mean.square().sum()) for mean in exact)
    sums, noise = ([torch.zeros_like(mean) for mean in exact] for _ in range(2))
    along = list[float]()
    for _ in range(count):
        model.zero_grad()
        model().backward()
        errors = [p.grad.double() - mean for p, mean in zip(given.parameters(), exact) if p.grad is not None]
        torch._foreach_add_(sums, errors)
        torch._foreach_addcmul_(noise, errors, errors)
        products = torch.stack([(error * mean).sum() for error, mean in zip(errors, exact)])
        along.append(float(products.sum()) / squares)
    shaped = len(handle._shapes.names)
    handle.detach()
    # The square of a sum of independent errors is the sum of their squares, plus products that are zero on average:
    # count (count - 1) of them for each value, each pair twice.
    of_sums = sum(float(total.square().sum()) for total in sums)
    of_all = sum(float(total.sum()) for total in noise)
    variances = sum(float((t / count).square().sum()) for t in noise)
    error = statistics.stdev(along) / count**0.5
    return {
        "draws": count, "bias": f"{of_sums / of_all:.4f}",
        "bias_error": f"{(2 * count * (count - 1) * variances) ** 0.5 / of_all:.4f}",
        "shrink": f"{abs(statistics.fmean(along)) / error:.2f}", "shaped": shaped,
    }  # fmt: skip


def differing(parameters: Sequence[torch.Tensor]) -> int:
    """Ranks whose parameters have other bits than rank 0's."""
    flat = torch.cat([p.reshape(-1) for p in parameters]).view(torch.int32).long()
    weights = torch.arange(flat.numel(), device=flat.device) % 65521 + 1
    sums = torch.stack([flat.sum(), (flat * weights).sum()])
    everybodys = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, sums)
    return sum(bool((other != everybodys[0]).any()) for other in everybodys)


def measure(kind: str, options: argparse.Namespace, device: torch.device, text: torch.Tensor) -> dict[str, Any]:
    training = Training(kind, options, device, text)
    means, shares, losses, times = TrueMeans(training.handle), list[float](), list[torch.Tensor](), list[float]()
    saved: dict[str, Any] = {}
    for step in range(options.steps):
        if step == options.steps - RESUMED:
            saved = training.saved()
        means.active = step % PROBED == 0
        began = time.perf_counter()
        losses.append(training.step(step))
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if means.active:
            shares.append(means.share())
    stats = training.handle.stats()
    coarser = torch.tensor([stats["noise"]["coarser"]], device=device)
    dist.all_reduce(coarser)
    loss = torch.stack(losses[-max(1, options.steps // 10) :]).mean()
    dist.all_reduce(loss)
    apart = differing(training.parameters())
    drawn = draws(training, options.draws)
    training.handle.detach()

    again = Training(kind, options, device, text)
    again.load(saved)
    for step in range(options.steps - RESUMED, options.steps):
        again.step(step)
    same = torch.tensor(
        [all(torch.equal(a, b) for a, b in zip(again.parameters(), training.parameters()))], device=device
    ).long()
    dist.all_reduce(same, dist.ReduceOp.MIN)
    again.handle.detach()
    return {
        "optimizer": kind, "codec": options.codec, "ranks": dist.get_world_size(), "steps": options.steps,
        "parameters": sum(p.numel() for p in training.parameters()), "texts": options.texts, "length": options.length,
        "share": f"{stats['noise']['share']:.6f}", "worst": f"{stats['noise']['worst']:.6f}",
        "true_share": f"{statistics.fmean(shares):.6f}", "true_worst": f"{max(shares):.6f}",
        "ratio": f"{stats['ratio']:.3f}", "bits": f"{stats['noise']['bits']:.3f}", "coarser": int(coarser),
        "differing": apart, "resumed": int(same), "loss": f"{float(loss) / dist.get_world_size():.4f}",
        "ms": f"{1e3 * statistics.median(times):.1f}", "runner": stats["runner"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", **drawn,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--codec", default="noise", help="with its share, such as noise:share=0.1%%")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=128, help="bytes of a text")
    parser.add_argument("--texts", type=int, default=8, help="of a rank in a step")
    parser.add_argument("--data", type=Path, help="the folder of enwik8; without it Python's own sources are the text")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    if options.steps <= RESUMED:
        parser.error(f"--steps {options.steps}: at least {RESUMED + 1}, as the last {RESUMED} are trained once more")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products have the same bits every time
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    text = capture.corpus() if options.data is None else torch.from_numpy(data.enwik8(options.data).copy())
    done = [tuple(row[key] for key in KEY) for row in read(options.csv)]
    dist.barrier()  # all ranks have read it
    name = torch.cuda.get_device_name() if cuda else "cpu"
    for kind in options.optimizers.split(","):
        sized = Gpt(256, options.width, options.blocks, options.heads, options.length, rotary=True)
        wanted = (
            *(kind, options.codec, dist.get_world_size(), options.steps, sum(p.numel() for p in sized.parameters())),
            *(options.texts, options.length),
        )
        if (*map(str, wanted), name) in done:
            continue
        began = time.perf_counter()
        row = measure(kind, options, device, text)
        if dist.get_rank() == 0:
            append(options.csv, [row], FIELDS)
            print(
                "  ".join(f"{key}={row[key]}" for key in FIELDS), f"({time.perf_counter() - began:.0f} s)", flush=True
            )
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
