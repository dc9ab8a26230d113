"""One run: a task, a policy and a seed become a row of a CSV file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradzip import Accordion
from gradzip.policy import Adaptive, Policy, as_policy, small

from .rates import Rates
from .stacked import StackedWorkers
from .tasks import TASKS
from .training import WorkerGradients, set_rate

Row = dict[str, Any]
Found = list[tuple[str, tuple[str, ...], list[Row]]]  # rows for other files: name, fields and rows

FIELDS = (
    *("task", "row", "policy", "seed", "workers", "epochs", "steps", "metric", "value", "loss", "mib_per_epoch"),
    *("own_bits", "sum_bits", "ms_gradients", "ms_exchange", "seconds", "device", "limit", "evaluations", "losses"),
)
POINTS = 100  # of the loss curve that a row keeps
EVALUATIONS = 6  # in a run, besides the last
PROBES = 8  # real frames in a run


@dataclass(frozen=True)
class Run:
    """What a row of a table stands for."""

    experiment: str  # its folder
    task: str
    row: str  # what the table calls it
    policy: str
    seed: int = 0
    minutes: float = 1.5  # a guess, until rows say better
    probe: str = ""  # "rates": look at gradients on the way

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.row, self.seed


def policy_of(text: str) -> Policy:
    """`plain`, a codec's text form, or `accordion ~ low ~ high ~ epochs=2,lr_drop=1`."""
    if text == "plain":
        return as_policy("identity")
    if not text.startswith("accordion"):
        return as_policy(text)
    _, low, high, options = (part.strip() for part in text.split("~"))
    numbers: dict[str, Any] = {}
    for item in options.split(","):
        key, value = item.split("=")
        numbers[key] = float(value) if "." in value else int(value)
    return Accordion(low, high, **numbers)


def train(
    run: Run, root: Path, device: torch.device, limit: int | None = None, epochs: int | None = None, graph: bool = True
) -> tuple[Row, Found]:
    """The row of a run, and what was found on the way."""
    began = time.perf_counter()
    kind = TASKS[run.task]
    if epochs is not None:
        kind = type(kind.__name__, (kind,), {"epochs": epochs})
    task = kind(root, device, run.seed, limit)
    policy = policy_of(run.policy)
    workers = StackedWorkers(task.model, task.optimizer, policy, task.workers)
    gradients = WorkerGradients(task.model, task.loss, workers.rows, graph and task.graph and device.type == "cuda")
    total = task.epochs * task.steps
    losses, evaluations = list[torch.Tensor](), list[tuple[float, float]]()
    rates = Rates(task, run.task, run.seed) if run.probe == "rates" else None
    frames: dict[str, float] = {}
    watch = _Watch(device, total)
    for step in range(total):
        epoch = step / task.steps
        set_rate(task.optimizer, task.rate(epoch))
        watch.start(step)
        loss = gradients(task.batches(step // task.steps, step % task.steps))
        watch.stop(step, "gradients")
        losses.append(loss)
        if rates is not None:
            rates.look(workers, step)
        watch.start(step)
        for key, value in workers.mean(probe=_often(step, total, PROBES) and step > 0).items():
            frames[key] = frames.get(key, 0.0) + value
        watch.stop(step, "exchange")
        task.before_step()
        task.optimizer.step()
        if (step + 1) % task.steps == 0:
            workers.end_epoch()
        if _often(step + 1, total, EVALUATIONS) and step + 1 < total:
            evaluations.append((round((step + 1) / task.steps, 3), task.evaluate()))
    value = task.evaluate()
    evaluations.append((float(task.epochs), value))
    curve = torch.stack(losses).float().cpu()
    per_epoch = workers.sent / task.epochs / 2**20
    if frames:  # gcomp's payloads, by what its real frames had
        compressed = frames["own_bytes"] / (4 * frames["values"])
        big = sum(p.stop - p.start for p in workers.places.values() if not small(p.shape))
        per_epoch -= 4 * big * (1 - compressed) * task.steps / 2**20
    chunks = curve.tensor_split(min(POINTS, len(curve)))
    row = {
        "task": run.task, "row": run.row, "policy": run.policy, "seed": run.seed, "workers": task.workers,
        "epochs": task.epochs, "steps": total, "metric": task.metric, "value": round(value, 4),
        "loss": round(float(chunks[-1].mean()), 5), "mib_per_epoch": round(per_epoch, 3),
        "own_bits": _bits(frames, "own_bytes"), "sum_bits": _bits(frames, "sum_bytes"),
        "ms_gradients": watch.median("gradients"), "ms_exchange": watch.median("exchange"),
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "limit": limit or "",
        "evaluations": " ".join(f"{epoch:g}:{figure:.4g}" for epoch, figure in evaluations),
        "losses": " ".join(f"{float(chunk.mean()):.6g}" for chunk in chunks),
    }  # fmt: skip
    if isinstance(policy, Adaptive):
        row["evaluations"] += " | " + _decisions(policy)
    return row, rates.found() if rates is not None else []


def _often(step: int, total: int, count: int) -> bool:
    """True for about `count` of the steps, evenly."""
    return (step * count) // total != ((step - 1) * count) // total


def _bits(frames: dict[str, float], key: str) -> str:
    return f"{8 * frames[key] / frames['values']:.3f}" if frames else ""


def _decisions(policy: Adaptive) -> str:
    """How many layers were critical after each decision."""
    return " ".join(f"{entry['step']}:{len(entry['critical'])}/{entry['layers']}" for entry in policy.history)


class _Watch:
    """Times of some steps, between which the device is waited for; the others run freely."""

    def __init__(self, device: torch.device, total: int) -> None:
        self._cuda, self._from, self._began = device.type == "cuda", total // 3, 0.0
        self._times: dict[str, list[float]] = {}

    def _timed(self, step: int) -> bool:
        return self._from <= step < self._from + 7

    def start(self, step: int) -> None:
        if self._timed(step):
            self._wait()
            self._began = time.perf_counter()

    def stop(self, step: int, what: str) -> None:
        if self._timed(step):
            self._wait()
            self._times.setdefault(what, []).append(time.perf_counter() - self._began)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def median(self, what: str) -> float:
        times = sorted(self._times.get(what, [0.0]))
        return round(1e3 * times[len(times) // 2], 3)
