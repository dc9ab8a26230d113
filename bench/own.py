"""What all ranks of a small GPT send, where its gradients come from float32 or 16-bit arithmetic, by `gcomp:own=`.

    python bench/own.py --csv bench/results/own.csv

Ranks are processes over loopback. Every row trains the same model on the same text; all replicas must be equal in the
end, to the bit. `ratio` is that of stats(): what a plain exchange of float32 would send to what was sent. `look_ms` is
the time that a rank spent on finding out which gradients go lossless, in all steps.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import capture
from gradzip.codecs import local_lossless

POLICIES = ("gcomp:mode=lossless", "gcomp:own=near", "gcomp:own=lossless", "gcomp", "gcomp:ulps=256")
BATCH = 4  # sequences
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_look = local_lossless.smaller_lossless


class Looks:
    """The rule, with a clock."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, gradients: Sequence[Any]) -> list[bool]:
        begun = time.thread_time()
        found = _look(gradients)
        self.seconds += time.thread_time() - begun
        return found


def train(policy: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(capture.ByteModel(capture.ModelSize(options.width, options.blocks, BATCH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=capture.PEAK_LR)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16")
    local_lossless.smaller_lossless = looks = Looks()
    handle = gradzip.attach(model, optimizer, policy, scaler=scaler if kind == "fp16" else None)
    text, rng = capture.corpus(), torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = capture.learning_rate(step, step / options.steps)
        inputs, targets = capture.batch(text, BATCH, rng, 64)
        with torch.autocast("cpu", TYPES[kind], enabled=kind != "float32"):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    stats = handle.stats()
    handle.detach()
    bits = torch.stack([p.detach().view(torch.int32).to(torch.int64).sum() for p in model.parameters()])
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits)
    if any(not torch.equal(other, bits) for other in gathered):
        raise SystemExit(f"{policy}, {kind}: replicas differ")
    return {
        "gradients": kind, "codec": policy, "ranks": dist.get_world_size(), "steps": options.steps,
        "parameters": sum(p.numel() for p in model.parameters()), "ratio": round(stats["ratio"], 3),
        "look_ms": round(1e3 * looks.seconds, 2), "loss": round(loss.item(), 4),
    }  # fmt: skip


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    rows = []
    for kind in options.gradients.split(","):
        for policy in POLICIES:
            rows.append(train(policy, kind, options))
            if rank == 0:
                print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if rank == 0 and options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    # Models in cycles hold the group. Its threads must end before Python does: one that then drops the tensors of the
    # last collective ends the process by "terminate called without an active exception" (seen with torch 2.13).
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gradients", default="float32,bf16", help="of these types of arithmetic; fp16 is slow on CPUs"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
