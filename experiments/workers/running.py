"""One run: a task, a policy and a seed become a row of a CSV file."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradzip import Accordion
from gradzip.errors import Unsupported
from gradzip.policy import Adaptive, Policy, as_policy, small

from .rates import Rates
from .stacked import StackedWorkers, linear
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


class BrokenOff(Exception):
    """The time is up; the same call goes on from what the run has left behind."""


@dataclass
class Limits:
    """Until when a run may train, and where it leaves what it needs to go on."""

    until: float = math.inf  # by `clock`
    kept: Path | None = None  # a folder; None: a run that is broken off is lost
    every: float = 150.0  # seconds between two savings, should the process be killed
    clock: Callable[[], float] = time.monotonic


def train(
    run: Run,
    root: Path,
    device: torch.device,
    limit: int | None = None,
    epochs: int | None = None,
    graph: bool = True,
    limits: Limits | None = None,
) -> tuple[Row, Found]:
    """The row of a run, and what was found on the way. Raises BrokenOff when its time is up."""
    limits = limits or Limits()
    began = limits.clock()
    policy = policy_of(run.policy)
    kind = TASKS[run.task]
    kind = type(kind.__name__, (kind,), {
        "epochs": kind.epochs if epochs is None else epochs, "as_one": kind.long and linear(policy),
    })  # fmt: skip
    task = kind(root, device, run.seed, limit)
    workers = StackedWorkers(task.model, task.optimizer, policy, task.workers)
    gradients = WorkerGradients(task.model, task.loss, workers.rows, graph and task.graph and device.type == "cuda")
    total = task.epochs * task.steps
    losses, evaluations = list[torch.Tensor](), list[tuple[float, float]]()
    rates = Rates(task, run.task, run.seed) if run.probe == "rates" else None
    frames: dict[str, float] = {}
    watch = _Watch(device, total)
    first, spent, going = 0, 0.0, True
    progress = None if limits.kept is None else Progress(limits.kept, run, total, limit)
    if progress is not None and (state := progress.load(device)) is not None:
        first, spent, losses = state["step"], state["seconds"], list(state["losses"].unbind())
        evaluations, frames, watch.times = state["evaluations"], state["frames"], state["times"]
        task.load_state_dict(state["task"])
        workers.load_state_dict(state["workers"])
        if rates is not None:
            rates.rows, rates.samples = state["rates"]
    saved = began
    for step in range(first, total):
        now = limits.clock()
        if progress is not None and step > first and (now > limits.until or now > saved + limits.every):
            progress.save({
                "step": step, "seconds": spent + now - began, "losses": torch.stack(losses), "frames": frames,
                "evaluations": evaluations, "times": watch.times, "task": task.state_dict(),
                "workers": workers.state_dict(), "rates": None if rates is None else (rates.rows, rates.samples),
            })  # fmt: skip
            saved = limits.clock()
        if now > limits.until and step > first:
            raise BrokenOff(f"{run.task} {run.row} seed {run.seed}: {step} of {total} steps")
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
            going = math.isfinite(float(loss))
        if not going:
            break  # it does not come back from there: the row says after how many steps
        if _often(step + 1, total, EVALUATIONS) and step + 1 < total:
            evaluations.append((round((step + 1) / task.steps, 3), task.evaluate()))
    value = task.evaluate()
    done = len(losses) / task.steps  # epochs
    evaluations.append((done, value))
    curve = torch.stack(losses).float().cpu()
    per_epoch = workers.sent / done / 2**20
    if frames:  # gcomp's payloads, by what its real frames had
        compressed = frames["own_bytes"] / (4 * frames["values"])
        big = sum(p.stop - p.start for p in workers.places.values() if not small(p.shape))
        per_epoch -= 4 * big * (1 - compressed) * task.steps / 2**20
    chunks = curve.tensor_split(min(POINTS, len(curve)))
    row = {
        "task": run.task, "row": run.row, "policy": run.policy, "seed": run.seed, "workers": task.stands_for,
        "epochs": task.epochs, "steps": len(losses), "metric": task.metric, "value": round(value, 4),
        "loss": round(float(chunks[-1].mean()), 5), "mib_per_epoch": round(per_epoch, 3),
        "own_bits": _bits(frames, "own_bytes"), "sum_bits": _bits(frames, "sum_bytes"),
        "ms_gradients": watch.median("gradients"), "ms_exchange": watch.median("exchange"),
        "seconds": round(spent + limits.clock() - began, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "limit": limit or "",
        "evaluations": " ".join(f"{epoch:g}:{figure:.4g}" for epoch, figure in evaluations),
        "losses": " ".join(f"{float(chunk.mean()):.6g}" for chunk in chunks),
    }  # fmt: skip
    if isinstance(policy, Adaptive):
        row["evaluations"] += " | " + _decisions(policy)
    if progress is not None:
        progress.remove()
    return row, rates.found() if rates is not None else []


class Progress:
    """What a run that is broken off leaves behind: a file of tensors, and one that says how far it came."""

    def __init__(self, folder: Path, run: Run, total: int, limit: int | None = None) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", f"{run.task} {run.row} {run.seed} {limit or ''}".lower()).strip("-")
        self._tensors, self._said = folder / f"{name}.pt", folder / f"{name}.json"
        self._is = {"policy": run.policy, "total": total}

    def said(self) -> dict[str, Any] | None:
        """`step`, `total` and `seconds` so far."""
        return json.loads(self._said.read_text()) if self._said.exists() and self._tensors.exists() else None

    def load(self, device: torch.device) -> dict[str, Any] | None:
        said = self.said()
        if said is None:
            return None
        if {key: said[key] for key in self._is} != self._is:
            raise Unsupported(
                f"{self._tensors} is of a run with {said}, not {self._is}: delete it, or take its settings"
            )
        state: dict[str, Any] = torch.load(self._tensors, map_location=device, weights_only=False)
        torch.set_rng_state(state["random"].cpu())
        if device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"].cpu())
        return state

    def save(self, state: dict[str, Any]) -> None:
        self._tensors.parent.mkdir(parents=True, exist_ok=True)
        random = {"random": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            random["random_cuda"] = torch.cuda.get_rng_state()
        fresh = self._tensors.with_suffix(".new")
        torch.save(state | random, fresh)
        fresh.replace(self._tensors)  # whole or not at all
        said = self._is | {"step": state["step"], "seconds": round(state["seconds"], 1)}
        self._said.write_text(json.dumps(said))

    def remove(self) -> None:
        self._said.unlink(missing_ok=True)
        self._tensors.unlink(missing_ok=True)


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
        self.times: dict[str, list[float]] = {}

    def _timed(self, step: int) -> bool:
        return self._from <= step < self._from + 7

    def start(self, step: int) -> None:
        if self._timed(step):
            self._wait()
            self._began = time.perf_counter()

    def stop(self, step: int, what: str) -> None:
        if self._timed(step):
            self._wait()
            self.times.setdefault(what, []).append(time.perf_counter() - self._began)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def median(self, what: str) -> float:
        times = sorted(self.times.get(what, [0.0]))
        return round(1e3 * times[len(times) // 2], 3)
