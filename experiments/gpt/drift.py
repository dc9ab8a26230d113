"""Does near mode keep its promise in GPT-2's training, and how far do the losses of policies drift apart?

    gradzip emulate --no-limit --gpu-share --hosts 4 -- python drift.py --data DATA     # GPT-2, real ranks
    python drift.py --small --data DATA              # a small GPT on the CPU, simulated workers, some minutes

Every policy trains the same steps; drift.csv has its loss at each and how far that is from plain training's, the first
of the policies. `plain, again` says whether a run repeats itself. In `nudged N` plain training starts with each
parameter one float32 number higher or lower, by chance (N is the seed): what the least of differences becomes.

The means of the policy `--checked` are looked at: how many values are further from the exact mean than near mode
promises (2^floor of the value's grid, and float32's own rounding), and how many became zero and were not.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip.engines.layout import EXACT
from gradzip.sensitivity import rules

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from real_ranks import attach, joined  # noqa: E402
from series import read  # noqa: E402
from workers.data import enwik8_words  # noqa: E402
from workers.running import policy_of  # noqa: E402
from workers.stacked import StackedWorkers  # noqa: E402
from workers.tasks import Gpt124, Task  # noqa: E402
from workers.texts import Gpt  # noqa: E402
from workers.training import WorkerGradients, set_rate  # noqa: E402

FIELDS = ("where", "policy", "step", "loss", "to_plain", "checked", "further_off", "zeroed", "device", "limit")
PLAIN = "plain"
POLICIES = {
    "real": "plain;plain, again;nudged 1;nudged 2;nudged 3;gcomp:mode=lossless;gcomp;gcomp:keep=7;torch bf16",
    "small": "plain;nudged 1;nudged 2;nudged 3;gcomp:mode=lossless;gcomp;gcomp:keep=7;cast",
}
CHECKED = (0, 1, 2, 5, 10, 15, *range(18, 26), 28, 31)  # steps; simulated workers are looked at in all
GRADIENTS = dict[torch.Tensor, torch.Tensor]


class Small(Gpt124):
    """2 blocks of width 96 and 16,384 words, in float32 or with BF16 autocast; 4 workers with 4 texts of 64 words."""

    batch, length, held_out, peak, mixed = 4, 64, 1 << 12, 2e-3, False

    def __init__(self, root: Path, device: torch.device, seed: int, limit: int | None) -> None:
        Task.__init__(self, root, device, seed, limit)
        vocabulary = 2048 if self.tiny else 16384
        words = torch.from_numpy(enwik8_words(root, vocabulary, 1 << 21))
        self.text, self.test = words[: -self.held_out], words[-self.held_out :]
        self.model = Gpt(vocabulary, 96, 2, 4, self.length)
        self.optimizer = torch.optim.AdamW(self.groups(0.1), lr=self.peak, betas=(0.9, 0.95))
        self.steps = 1000

    def rate(self, epoch: float) -> float:
        return self.peak * min(1.0, (epoch * self.steps + 1) / 20)

    def cast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.mixed)


def gradzips(what: str) -> str:
    """The policy that it is for gradzip."""
    return PLAIN if what.startswith((PLAIN, "nudged")) else what


@torch.no_grad()
def nudge(what: str, model: torch.nn.Module) -> None:
    if not what.startswith("nudged"):
        return
    parameters = list(model.parameters())
    rng = torch.Generator(parameters[0].device).manual_seed(int(what.removeprefix("nudged")))
    for p in parameters:
        up = torch.rand(p.shape, generator=rng, device=p.device) < 0.5
        p.copy_(torch.nextafter(p, torch.where(up, math.inf, -math.inf)))


class Check:
    """Counts values of the means, those further off than near mode promises, and those that became zero."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._floors = rules(optimizer)
        self.checked = self.further_off = self.zeroed = 0

    def look(self, parameter: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
        """What the parameter's gradient is; what the mean of the ranks' is, and that of their magnitudes."""
        mean, floor = parameter.grad, self._floors[parameter]
        assert mean is not None
        allowed = magnitude * 2.0**-21 + 1e-37  # sums in float32, in whatever order
        if floor is not None:
            bits = floor.tensor().view_as(mean)
            allowed = allowed + torch.where(bits == EXACT, 0.0, torch.exp2(bits.float()))
        self.checked += mean.numel()
        self.further_off += int(((mean - exact).abs() > allowed).sum())
        self.zeroed += int(((mean == 0) & (exact != 0)).sum())

    def cells(self) -> dict[str, int]:
        return {"checked": self.checked, "further_off": self.further_off, "zeroed": self.zeroed}


# --- Real ranks --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept() -> Iterator[GRADIENTS]:
    """A rank's own gradients, as they come to gradzip."""
    found: GRADIENTS = {}
    inner = gradzip.Handle.reduce

    def reduce(self: gradzip.Handle, bucket: GradBucket) -> Any:
        found.update((p, g.clone()) for p, g in zip(bucket.parameters(), bucket.gradients()))
        return inner(self, bucket)

    gradzip.Handle.reduce = reduce  # type: ignore[method-assign]
    try:
        yield found
    finally:
        gradzip.Handle.reduce = inner  # type: ignore[method-assign]


def real(what: str, options: argparse.Namespace, device: torch.device, group: Any) -> tuple[list[float], dict]:
    """Losses of GPT-2 with real ranks, and what was seen at steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    task: Task = type("Gpt124", (Gpt124,), {"workers": world})(options.data, device, 0, options.limit)
    nudge(what, task.model)
    torch.manual_seed(rank)
    model = DistributedDataParallel(task.model, device_ids=[device.index] if device.type == "cuda" else None)
    task.model = model  # type: ignore[assignment]  # so that its loss goes through DDP
    handle = attach(gradzips(what), model, task.optimizer, Path())
    losses, seen = list[torch.Tensor](), dict[int, dict[str, int]]()
    for step in range(options.steps):
        set_rate(task.optimizer, task.rate(step / task.steps))
        batch = list(task.batches(0, step))[rank]
        loss = task.loss(*batch)
        task.optimizer.zero_grad()
        if what == options.checked and step in CHECKED:
            check = Check(task.optimizer)
            with kept() as own:
                loss.backward()
            for parameter, gradient in own.items():
                exact, magnitude = gradient.clone(), gradient.abs()
                for sums in (exact, magnitude):
                    dist.all_reduce(sums)
                    sums /= world
                check.look(parameter, exact, magnitude)
            seen[step] = check.cells()
        else:
            loss.backward()
        task.before_step()
        task.optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).float().cpu()
    dist.all_reduce(mean, group=group)
    if handle is not None:
        handle.detach()
    return (mean / world).tolist(), seen


# --- Simulated workers -------------------------------------------------------------------------------------------


def small(what: str, options: argparse.Namespace, mixed: bool) -> tuple[list[float], dict]:
    """The same of a small GPT with simulated workers."""
    task = type("Small", (Small,), {"mixed": mixed})(options.data, torch.device("cpu"), 0, options.limit)
    nudge(what, task.model)
    workers = StackedWorkers(task.model, task.optimizer, policy_of(gradzips(what)), task.workers)
    gradients = WorkerGradients(task.model, task.loss, workers.rows, False)
    losses, seen = list[float](), dict[int, dict[str, int]]()
    for step in range(options.steps):
        set_rate(task.optimizer, task.rate(step / task.steps))
        losses.append(float(gradients(task.batches(0, step))))
        workers.mean()
        if what == options.checked:
            check = Check(task.optimizer)
            for parameter, *own in zip(task.model.parameters(), *workers.rows):
                stacked = torch.stack(own).double()
                check.look(parameter, stacked.mean(0), stacked.abs().mean(0))
            seen[step] = check.cells()
        task.before_step()
        task.optimizer.step()
    return losses, seen


# --- Rows --------------------------------------------------------------------------------------------------------


def rows_of(common: dict[str, Any], losses: list[float], plain: list[float], seen: dict) -> list[dict[str, Any]]:
    return [
        common
        | {"step": step, "loss": f"{loss:.6f}", "to_plain": f"{loss - base:+.6f}"}
        | seen.get(step, dict.fromkeys(("checked", "further_off", "zeroed"), ""))
        for step, (loss, base) in enumerate(zip(losses, plain))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """In the place of rows of the same policy, or at the end."""
    key = [rows[0][name] for name in ("where", "policy")]
    others = [row for row in read(path) if [row["where"], row["policy"]] != key]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(others + rows)


def run(where: str, options: argparse.Namespace, device: torch.device, group: Any = None) -> None:
    """All policies; rank 0 writes their rows as they come."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    policies, curves = options.policies.split(";"), dict[str, list[float]]()
    for what in [PLAIN, *(policy for policy in policies if policy != PLAIN)]:
        began = time.perf_counter()
        if options.small:
            losses, seen = small(what, options, mixed=where.endswith("autocast"))
        else:
            losses, seen = real(what, options, device, group)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        curves[what] = losses
        if options.small or dist.get_rank() == 0:
            common = {"where": where, "policy": what, "device": name, "limit": options.limit or ""}
            write(options.csv, rows_of(common, losses, curves[PLAIN], seen))
            off = [loss - base for loss, base in zip(losses, curves[PLAIN])]
            said = " ".join(f"{part:+.5f}" for part in off[::4])
            broken = sum(cells["further_off"] for cells in seen.values())
            counted = f"; {broken} further off than promised" if seen else ""
            print(f"{where}, {what}: {time.perf_counter() - began:.0f} s, to plain {said}{counted}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small GPT by one process on the CPU")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, help="of each policy; 34, or 40 of the small GPT")
    parser.add_argument("--policies", help="separated by ;")
    parser.add_argument("--checked", default="gcomp", metavar="POLICY", help="one of near mode's")
    parser.add_argument("--limit", type=int, help="a tiny form of the task, to try it out")
    parser.add_argument("--csv", type=Path, default=HERE / "drift.csv")
    options = parser.parse_args()
    options.steps = options.steps or (40 if options.small else 34)
    options.policies = options.policies or POLICIES["small" if options.small else "real"]
    if options.limit and options.csv == HERE / "drift.csv":
        parser.error("--limit needs --csv: its rows do not belong into the tables")
    if options.small:
        for where in ("CPU, float32", "CPU, autocast"):
            run(where, options, torch.device("cpu"))
        return
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with joined("nccl" if cuda else "gloo", 1):
        run(f"{'GPU' if cuda else 'CPU'}, real ranks", options, device, dist.new_group(backend="gloo"))


if __name__ == "__main__":
    main()
