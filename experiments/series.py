"""Runs what the tables still lack, several runs side by side, until the time is up.

    python experiments/series.py powersgd accordion gcomp --data DATA --jobs 6 --minutes 9
    python experiments/series.py --list                       # what is there, what is missing, how long it may take

Each experiment's rows.py says what its tables need. A run that is done appends its row to the experiment's results.csv;
runs that are there already are not run again, so a series that was broken off goes on by the same command. The first
seed of everything comes before the second. When the time is up, runs leave what they need to go on in `--kept`, and the
same command goes on with them first. No run is started that would not end in time, counting the minutes `--later` that
further calls on this machine have, and going by how long runs of the same task took before.

On a GPU the processes share it by CUDA's multi-process service where that is installed. `--limit N` runs tiny forms of
all tasks on N samples: to see whether everything works. Its rows go elsewhere by `--results`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import gc
import importlib.util
import multiprocessing as mp
import os
import queue
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from workers import data, tasks  # noqa: E402
from workers.running import FIELDS, BrokenOff, Limits, Progress, Run, train  # noqa: E402
from workers.texts import sentences  # noqa: E402

from gradzip.emulate import mps  # noqa: E402
from gradzip.errors import GradzipError  # noqa: E402

EXPERIMENTS = ("powersgd", "accordion", "gcomp")
ON_DEMAND = {"accordion-100": "CIFAR100"}  # tables whose data is not always there: their name in rows.py
RESULTS = "results.csv"
KEPT = HERE.parent / "build/runs"  # of runs that were broken off
LEAVING = 12.0  # seconds before the end in which runs save what they are
SHORTEST = 45.0  # seconds: with less than that left nothing long is begun


def runs_of(experiment: str) -> list[Run]:
    """All runs that the experiment's tables need, in the order of importance."""
    folder = experiment.partition("-")[0]
    spec = importlib.util.spec_from_file_location(f"{folder}_rows", HERE / folder / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: list[tuple[Run, int]] = getattr(module, ON_DEMAND.get(experiment, "ROWS"))
    return [replace(run, seed=seed) for run, seeds in rows for seed in range(seeds)]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several may write at once
        writer = csv.DictWriter(file, fields)
        if path.stat().st_size == 0:
            writer.writeheader()
        writer.writerows(rows)


def missing(experiments: list[str], results: Path, seeds: int | None, only: str) -> list[Run]:
    found = []
    for experiment in experiments:
        runs = runs_of(experiment)
        done = {(r["task"], r["row"], int(r["seed"])) for r in read(results / runs[0].experiment / RESULTS)}
        for run in runs:
            if run.key not in done and (seeds is None or run.seed < seeds) and re.search(only, f"{run.task} {run.row}"):
                found.append(run)
    return sorted(found, key=lambda run: run.seed)  # stable: the order within a seed stays


class Guess:
    """How long runs take: what runs of the task took before on this device, or what its rows.py says."""

    def __init__(self, results: Path, device: str) -> None:
        self._seconds: dict[str, float] = {}
        for experiment in EXPERIMENTS:
            for row in read(results / experiment / RESULTS):
                if row["device"] == device and not row["limit"]:
                    self.learn(row["task"], float(row["seconds"]))

    def learn(self, task: str, seconds: float) -> None:
        self._seconds[task] = max(seconds, self._seconds.get(task, 0.0))

    def __call__(self, run: Run) -> float:
        return self._seconds.get(run.task, 60 * run.minutes)

    def measured(self, task: str) -> bool:
        return task in self._seconds

    def left(self, run: Run, kept: Path) -> float:
        """The same, without what was done before the run was broken off."""
        said = Progress(kept, run, 0).said()
        return self(run) * (1 - said["step"] / said["total"] if said else 1)


def work(inbox: Any, outbox: Any, options: argparse.Namespace, deadline: float) -> None:
    """A process that takes run after run."""
    limits = Limits(deadline - LEAVING, options.kept)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device(options.device)
    while (run := inbox.get()) is not None:
        try:
            graph = not options.no_graph
            row, found = train(run, options.data, device, options.limit, options.epochs, graph, limits)
            outbox.put((run, row, found, ""))
        except BrokenOff as reason:
            outbox.put((run, None, [], reason))
        except BaseException:
            outbox.put((run, None, [], traceback.format_exc()))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the others may need it


@contextlib.contextmanager
def shared_gpu(wanted: bool) -> Iterator[None]:
    """CUDA's multi-process service for the processes started inside, where it is installed and none is given."""
    control = shutil.which(mps.CONTROL)
    if not wanted or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with mps.daemon(control) as variables:
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]


def run_all(todo: list[Run], options: argparse.Namespace, deadline: float) -> int:
    """Runs what fits; how many failed."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    guess, failures, later = Guess(options.results, name), 0, deadline + 60 * options.later
    left = sorted(todo, key=lambda run: Progress(options.kept, run, 0, options.limit).said() is None)  # stable
    context = mp.get_context("spawn")
    outbox, boxes, processes, busy = context.Queue(), [], [], dict[Any, int]()
    for _ in range(min(options.jobs, len(todo))):
        boxes.append(context.Queue())
        processes.append(context.Process(target=work, args=(boxes[-1], outbox, options, deadline), daemon=True))
        processes[-1].start()
    idle = list(range(len(boxes)))
    try:
        while True:
            while idle and left:
                now = time.monotonic()
                fits = [run for run in left if now + guess.left(run, options.kept) < later]
                if not fits or (options.later and now + SHORTEST > deadline):
                    break
                left.remove(fits[0])
                busy[fits[0]] = idle.pop()
                boxes[busy[fits[0]]].put(fits[0])
            if not busy:
                break
            try:
                run, row, found, error = outbox.get(timeout=2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    print(f"out of time: {len(busy)} runs are broken off", flush=True)
                    break
                for run in [run for run, place in busy.items() if not processes[place].is_alive()]:
                    print(f"FAILED {run.task} {run.row} seed {run.seed}: its process died", flush=True)
                    failures += 1
                    del busy[run]
                continue
            idle.append(busy.pop(run))
            if isinstance(error, BrokenOff):
                print(f"goes on later: {error}", flush=True)
                continue
            if row is None:
                failures += 1
                print(f"FAILED {run.experiment} {run.task} {run.row} seed {run.seed}\n{error}", flush=True)
                continue
            guess.learn(run.task, row["seconds"])
            append(options.results / run.experiment / RESULTS, [row], FIELDS)
            for path, fields, rows in found:
                append(options.results / run.experiment / path, rows, fields)
            print(
                f"{row['task']:24} {row['row']:32} seed {row['seed']}  {row['metric']} {row['value']:<8g} loss "
                f"{row['loss']:<8g} {row['mib_per_epoch']:9.2f} MiB  {row['ms_gradients']:7.1f} + "
                f"{row['ms_exchange']:6.1f} ms  {row['seconds']:.0f} s",
                flush=True,
            )
    finally:
        for box in boxes:
            box.put(None)
        for process in processes:
            process.join(0.1 if busy else 10)
            process.kill()
            process.join()
    print(f"{len(left)} runs are still to do", flush=True)
    return failures


def prepare(root: Path) -> None:
    """What is decoded once lies in the cache of workers/data.py from then on."""
    steps = {
        "CIFAR-10": lambda: data.cifar(root, 10),
        "WikiText-2": lambda: data.wikitext2(root),
        "SST-2, train": lambda: sentences(root, "train", tasks.Sst2.length),
        "SST-2, dev": lambda: sentences(root, "dev", tasks.Sst2.length),
        "enwik8": lambda: data.enwik8(root),
        "words of enwik8": lambda: data.enwik8_words(root, tasks.VOCABULARY, tasks.PART),
    }
    for name, step in steps.items():
        began = time.monotonic()
        try:
            step()
            print(f"{name}: ready after {time.monotonic() - began:.1f} s", flush=True)
        except GradzipError as error:
            print(f"{name}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "experiments", nargs="*", default=[], metavar="EXPERIMENT", help=", ".join([*EXPERIMENTS, *ON_DEMAND])
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that workers/data.py describes")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; the same call goes on")
    parser.add_argument("--later", type=float, default=0.0, help="minutes of further calls, with the same --kept")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the folder of runs that were broken off")
    parser.add_argument("--seeds", type=int, help="the first N seeds only")
    parser.add_argument("--only", default="", help="runs whose task and row match this expression")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-graph", action="store_true", help="do not capture CUDA graphs")
    parser.add_argument("--limit", type=int, help="tiny tasks of so many samples")
    parser.add_argument("--epochs", type=int, help="instead of the task's own, to try something out")
    parser.add_argument("--results", type=Path, default=HERE, help="the folder that has a folder for each experiment")
    parser.add_argument(
        "--prepare", action="store_true", help="decode the data once, for all processes, and run nothing"
    )
    parser.add_argument("--list", action="store_true", help="say what is missing, and run nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if (options.limit or options.epochs) and options.results == HERE:
        parser.error("--limit and --epochs need --results: their rows do not belong into the tables")
    todo = missing(options.experiments or list(EXPERIMENTS), options.results, options.seeds, options.only)
    if options.list:
        guess = Guess(options.results, torch.cuda.get_device_name() if options.device == "cuda" else "cpu")
        for run in todo:
            seconds = guess.left(run, options.kept)
            print(f"{run.experiment:10} {run.task:24} {run.row:34} seed {run.seed}  {seconds:5.0f} s  {run.policy}")
        print(f"{len(todo)} runs, {sum(guess.left(run, options.kept) for run in todo) / 60:.1f} minutes of runs")
        return
    if options.prepare:
        prepare(options.data)
        return
    with shared_gpu(options.device == "cuda" and options.jobs > 1):
        sys.exit(run_all(todo, options, deadline) > 0)


if __name__ == "__main__":
    main()
