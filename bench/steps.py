"""Step times of DDP training: plain, torch's own hooks, and gradzip's codecs, in one launch of the ranks.

    gradzip emulate --gpu-share --hosts 4 --rate 10gbit -- python bench/steps.py --model gpt2 --csv steps_gpu.csv
    gradzip emulate --hosts 4 --rate 1gbit -- python bench/steps.py --model mlp --csv steps_cpu.csv

Each row trains the same model on the same random batches for a few steps; times are medians over the steps of the
slowest rank, in milliseconds. All replicas must have the same parameters in the end, or the row says how many differ.
torch's own hooks run in processes of their own: one that hangs or crashes becomes a row that says so.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradzip

sys.path.insert(0, str(Path(__file__).parent))
import apart

OURS = (
    "noise;int8;int4;fp8;gcomp:mode=lossless;gcomp;gcomp:ulps=256;gcomp:keep=7;cast;powersgd:rank=2;powersgd:rank=4;powersgd:rank=32;"
    "topk:ratio=0.01;sign;onebit;qsgd:bits=8;terngrad;natural;randomk;randomblock;threshold;dgc"
)

COLUMNS = (
    "what", "ranks", "median_ms", "least_ms", "ratio", "replicas_differing", "loss", "device", "network", "outcome",
)  # fmt: skip


class Gpt2(nn.Module):
    """GPT-2 small, 124 M parameters, with torch's own layers."""

    def __init__(self, width: int = 768, blocks: int = 12, heads: int = 12, vocabulary: int = 50257, length: int = 256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1024, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.vocabulary, self.length = vocabulary, length

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places[:n], mask=mask, is_causal=True)
        logits = self.norm(x) @ self.tokens.weight.t()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Mlp(nn.Module):
    """20 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(2000, 2000), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Small(nn.Module):
    """1,000 tensors of 32 x 32: what a tensor costs whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten()[:4000].view(-1, 4).repeat(1, 8)  # one for each tensor
        return torch.stack([(row @ tensor).square().mean() for tensor, row in zip(self.tensors, rows)]).mean()


MODELS = {"gpt2": Gpt2, "mlp": Mlp, "small": Small}


def batch(model: nn.Module, device: torch.device, step: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if isinstance(model, Gpt2):
        return torch.randint(0, model.vocabulary, (4, model.length), generator=rng).to(device)
    return torch.randn(4, 2000, generator=rng).to(device)


def attach_torch(name: str) -> Callable[[DistributedDataParallel], None]:
    """A hook of torch's own; its bf16 hook refuses Gloo by name only."""

    def attach(model: DistributedDataParallel) -> None:
        if name == "bf16":

            def bf16(state, bucket):  # DDP reads annotations, and does not know postponed ones
                return default_hooks.bf16_compress_hook(state, bucket)

            model.register_comm_hook(None, bf16)
        else:
            state = powerSGD_hook.PowerSGDState(None, int(name), start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return attach


def measure(
    make: Callable[[], nn.Module], device: torch.device, what: str, steps: int, warm: int, *, say: bool = False
) -> dict[str, object]:
    torch.manual_seed(0)
    inner = make().to(device)
    model = DistributedDataParallel(inner, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = None
    if what.startswith("torch "):
        attach_torch(what.removeprefix("torch ").removeprefix("powersgd "))(model)
    elif what != "plain":
        handle = gradzip.attach(model, optimizer, gradzip.Plan.load(what) if what.endswith(".json") else what)
    times = []
    for step in range(warm + steps):
        if handle is not None and what.endswith(".json") and step == warm and dist.get_rank() == 0:
            handle.trace(what.replace(".json", "_trace.json"), steps=2)
        x = batch(inner, device, step)
        _wait(device)
        dist.barrier()
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _wait(device)
        times.append(time.perf_counter() - begin)
        if say:
            print(f"step {step + 1}", flush=True)
    slowest = torch.tensor(times[warm:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=_cpu_group())
    bits = torch.stack([p.detach().view(torch.int32).to(torch.int64).sum() for p in model.parameters()]).cpu()
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits, group=_cpu_group())
    differing = sum(bool((other != gathered[0]).any()) for other in gathered)
    ratio = float(handle.stats()["ratio"]) if handle is not None else 1.0
    if handle is not None:
        handle.detach()
    del model, inner, optimizer
    gc.collect()
    milliseconds = [1e3 * t for t in slowest.tolist()]
    return {
        "what": what, "ranks": dist.get_world_size(), "median_ms": round(statistics.median(milliseconds), 2),
        "least_ms": round(min(milliseconds), 2), "ratio": round(ratio, 2), "replicas_differing": differing,
        "loss": round(loss.item(), 4), "device": _name(device),
    }  # fmt: skip


def measure_apart(what: str, device: torch.device, options: argparse.Namespace) -> dict[str, object]:
    """The same in processes of its own, which may hang or crash."""
    script = [__file__, "--model", options.model, "--steps", str(options.steps), "--warm", str(options.warm)]
    row, outcome = apart.run([*script, "--only", what], options.silence, _cpu_group())
    if not outcome:
        return dict(json.loads(row))
    blank = dict.fromkeys(("median_ms", "least_ms", "ratio", "replicas_differing", "loss"), "")
    return {"what": what, "ranks": dist.get_world_size(), **blank, "device": _name(device), "outcome": outcome}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


_group: dist.ProcessGroup | None = None


def _cpu_group() -> dist.ProcessGroup:
    global _group
    if _group is None:
        _group = dist.new_group(backend="gloo")
    return _group


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--policies", default=OURS, help="gradzip's, or plan.json files, separated by ;")
    parser.add_argument("--torch", default="bf16;powersgd 2;powersgd 4;powersgd 32", help="torch's own, separated by ;")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--silence", type=float, default=60, help="seconds after which one of torch's hooks hangs")
    parser.add_argument("--only", help="one row, which is printed for a program to read")
    parser.add_argument("--network", default="", help="what to call the network in the file")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    cuda = options.model == "gpt2"
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    _cpu_group()
    make = MODELS[options.model]
    if options.only:
        row = measure(make, device, options.only, options.steps, options.warm, say=True)
        print(f"{apart.ROW}{json.dumps(row)}", flush=True)
        dist.destroy_process_group()
        return
    hooks = [f"torch {name}" for name in options.torch.split(";") if name]
    for what in ["plain", *hooks, *[p for p in options.policies.split(";") if p]]:
        if what in hooks and not cuda:  # over Gloo they may hang
            row = measure_apart(what, device, options)
        else:
            row = measure(make, device, what, options.steps, options.warm)
        row = {**row, "network": options.network, "outcome": row.get("outcome", "trained")}
        if dist.get_rank() == 0:
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            if options.csv:
                new = not options.csv.exists()
                with options.csv.open("a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
