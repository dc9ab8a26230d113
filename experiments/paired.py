"""Runs what noise/results.csv still lacks, in the order of noise/rows.py, until the time is up.

    python experiments/paired.py --data DATA --check                 # kernels against torch, bit for bit
    python experiments/paired.py --data DATA --probe                 # seconds per step of each task
    python experiments/paired.py gpt --data DATA --minutes 6         # tasks whose name begins with gpt
    python experiments/paired.py cifar --data DATA --jobs 8 --minutes 3
    python experiments/paired.py gpt --rows 'near|paper' --data DATA     # rows whose name begins like this
    python experiments/paired.py --list                              # what is missing, and how long it may take
    python experiments/paired.py --limit 8 --data DATA --results /tmp/try.csv      # tiny forms on a CPU

Rows are appended as soon as their group ends; runs whose rows are there are not run again. Runs of one seed begin with
the same values and see the same batches. A GPT group is one process that trains all its runs as one model; pictures,
sst2 and gpt2 are trained run by run, `--jobs` of them side by side.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
import multiprocessing as mp
import queue
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
from series import append, shared_gpu  # noqa: E402
from workers import noise, paired, paired_tasks, tasks  # noqa: E402

RESULTS = HERE / "noise/results.csv"
GPU, TOGETHER = "NVIDIA H200", 8  # whose times plan the queue, and how many single runs share it
# Tasks that are trained run by run, several side by side.
SINGLE: dict[str, paired.Photos | type[tasks.Task]] = {**paired.PHOTOS, **paired_tasks.PAIRED_TASKS}
# Seconds of a run, until rows say better; the first name that a task begins with.
GUESS = {"gpt-batch8": 12.0, "gpt-11m": 16.0, "gpt-muon": 4.0, "gpt2": 60.0, "gpt": 5.0, "cifar": 45.0, "sst2": 40.0}


def rows_module() -> Any:
    spec = importlib.util.spec_from_file_location("noise_rows", HERE / "noise/rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def missing(results: Path, only: str, rows: str = "") -> list[paired.Group]:
    """Groups with the variants that have no row yet: of tasks and rows whose names begin like these expressions."""
    done, found = {(r["task"], r["row"], int(r["seed"])) for r in read(results)}, list[paired.Group]()
    for group in rows_module().QUEUE:
        wanted = [(seed, v) for seed, v in group.runs if re.match(rows, v.name)]
        left = tuple((seed, v) for seed, v in wanted if (group.task, v.name, seed) not in done)
        if left and re.match(only, group.task):
            found.append(paired.Group(group.task, left))
    return found


class Guess:
    """Seconds of a run: what runs of the task took on this device, or a guess."""

    def __init__(self, results: Path, device: str) -> None:
        self._seconds = dict[str, float]()
        for row in read(results):
            if row["device"] == device and not row["limit"]:
                self.learn(row["task"], float(row["seconds"]))

    def learn(self, task: str, seconds: float) -> None:
        self._seconds[task] = max(seconds, self._seconds.get(task, 0.0))

    def measured(self, task: str) -> bool:
        return task in self._seconds

    def __call__(self, task: str, runs: int) -> float:
        prefix = next(name for name in GUESS if task.startswith(name))
        return runs * self._seconds.get(task, GUESS[prefix])


def seeds_of(group: paired.Group) -> str:
    return ", ".join(str(seed) for seed in dict.fromkeys(seed for seed, _ in group.runs))


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"{row['task']:12} {row['row']:24} seed {row['seed']}  loss {row['loss']}  train {row['train_loss']}  "
            f"{row['accuracy']:>6} share {100 * float(row['share']):8.4f} worst "
            f"{100 * float(row['worst_share']):8.4f} %  bits {row['own_bits']} {row['sum_bits']}  {row['seconds']} s",
            flush=True,
        )


def seconds_per_step(task: str, runs: Any, options: argparse.Namespace, compile: bool) -> float:
    """The seconds of a step, printed with memory and the time that it took to find out; NaN if the task fails."""
    began, device = time.monotonic(), torch.device(options.device)
    found = math.nan
    try:
        found = paired.train_texts(
            task, runs, options.data, device, limit=options.limit, kernels=options.kernels, probe=31,
            compile=compile,
        )[0]["per_step"]  # fmt: skip
    except Exception:
        print(f"FAILED {task} compile={compile}\n{traceback.format_exc()}", flush=True)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0
    print(
        f"{task} x {len(runs)} compile={compile}: {1e3 * found:.1f} ms per step, "
        f"{1e3 * found / len(runs):.2f} per run, {memory:.1f} GiB, {time.monotonic() - began:.1f} s in all",
        flush=True,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def texts(todo: list[paired.Group], options: argparse.Namespace, deadline: float, guess: Guess) -> int:
    device, failures = torch.device(options.device), 0
    while todo:
        group = todo.pop(0)
        count, name = len(group.runs), f"{group.task} seeds {seeds_of(group)}"
        if time.monotonic() + guess(group.task, count) > deadline:
            print(f"no time for {name}, {count} runs of {guess(group.task, 1):.1f} s", flush=True)
            continue
        try:
            rows = paired.train_texts(
                group.task, group.runs, options.data, device, limit=options.limit, deadline=deadline,
                kernels=options.kernels, compile=options.compile,
            )  # fmt: skip
        except paired.OutOfTime as reason:
            print(f"broken off: {name}: {reason}", flush=True)
            continue
        except Exception:
            failures += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            torch.cuda.empty_cache()
            if options.compile:  # GPU minutes are few: they shall not end because a compiler does
                print(f"{name} again, and all others, without torch.compile", flush=True)
                options.compile = False
                todo.insert(0, group)
            continue
        append(options.results, rows, paired.FIELDS)
        guess.learn(group.task, max(float(row["seconds"]) for row in rows))
        show(rows)
    return failures


def work(inbox: Any, outbox: Any, options: argparse.Namespace, deadline: float) -> None:
    """A process that trains run after run."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    while (job := inbox.get()) is not None:
        task, seed, variant = job
        try:
            train = paired.train_pictures if task in paired.PHOTOS else paired_tasks.train_task
            outbox.put((job, train(
                task, seed, variant, options.data, device, limit=options.limit, deadline=deadline,
                kernels=options.kernels,
            ), ""))  # fmt: skip
        except BaseException:
            outbox.put((job, [], traceback.format_exc()))


def single_runs(todo: list[paired.Group], options: argparse.Namespace, deadline: float, guess: Guess) -> int:
    jobs = [(group.task, seed, variant) for group in todo for seed, variant in group.runs]
    context, failures = mp.get_context("spawn"), 0
    inbox, outbox = context.Queue(), context.Queue()
    with shared_gpu(options.device == "cuda" and options.jobs > 1):
        count = min(options.jobs, len(jobs))
        processes = [
            context.Process(target=work, args=(inbox, outbox, options, deadline), daemon=True) for _ in range(count)
        ]
        for process in processes:
            process.start()
        busy = 0
        try:
            while True:
                while busy < count and jobs and time.monotonic() + guess(jobs[0][0], 1) < deadline:
                    inbox.put(jobs.pop(0))
                    busy += 1
                if not busy:
                    break
                try:
                    job, rows, error = outbox.get(timeout=2)
                except queue.Empty:
                    if time.monotonic() > deadline or not all(process.is_alive() for process in processes):
                        print(f"{busy} runs are broken off", flush=True)
                        break
                    continue
                busy -= 1
                if error:
                    failures += 1
                    print(f"FAILED {job[0]} {job[2].name} seed {job[1]}\n{error}", flush=True)
                    continue
                for row in rows:
                    row["beside"] = count
                    guess.learn(job[0], float(row["seconds"]))
                append(options.results, rows, paired.FIELDS)
                show(rows)
        finally:
            for _ in processes:
                inbox.put(None)
            for process in processes:
                process.join(0.1 if busy else 10)
                process.kill()
                process.join()
    print(f"{len(jobs)} single runs are still to do", flush=True)
    return failures


def check(options: argparse.Namespace) -> None:
    """Kernels against torch on the device, and torch on the device against torch on the CPU."""
    device = torch.device(options.device)
    shapes = {"words": (256, 384), "bias": (1152,), "up": (1536, 384), "zero": (5000,), "large": (300, 4100)}
    for world in (4, 16):
        layout, host = (noise.Layout(shapes, world, place) for place in (device, torch.device("cpu")))
        x = torch.randn(2, world, layout.length, generator=torch.Generator().manual_seed(1)) * 1e-3
        x = torch.where(host.valid, x, 0.0)
        host.views(x)[3].zero_()
        d = noise.shape_of(host, torch.where(host.valid, torch.randn(2, host.length).exp() ** 6, 0.0))
        budgets, seeds = torch.tensor([0.01, 0.3], dtype=torch.float64), [1, 2]
        for shape in (d, None):
            expected = noise.noisy_mean(host, x, shape, budgets, seeds, 5)
            there = None if shape is None else shape.to(device)
            for kernels in (False, True):
                found = noise.noisy_mean(layout, x.to(device), there, budgets.to(device), seeds, 5, kernels=kernels)
                same = torch.equal(found.mean.cpu(), expected.mean)
                share = [f"{100 * float(s):.4f}" for s in found.error / found.signal]
                print(
                    f"W={world} shape={shape is not None} kernels={kernels}: equal {same}, share {share} %", flush=True
                )
                if not same:
                    away = (found.mean.cpu() != expected.mean).sum()
                    sys.exit(f"{int(away)} of {expected.mean.numel()} values differ")


def probe(options: argparse.Namespace) -> None:
    """The first group of each task."""
    tasks = set[str]()
    for group in rows_module().QUEUE:
        if group.task in paired.TEXTS and group.task not in tasks and re.match(options.only, group.task):
            tasks.add(group.task)
            seconds_per_step(group.task, group.runs, options, options.compile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", metavar="TASK", help="tasks whose name begins like this")
    parser.add_argument("--rows", default="", help="rows whose name begins like this expression")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that workers/data.py describes")
    parser.add_argument("--jobs", type=int, default=1, help="runs on pictures, of sst2 and of gpt2 side by side")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-kernels", dest="kernels", action="store_false", help="torch instead of Triton on a GPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile for the blocks of GPT")
    parser.add_argument("--limit", type=int, help="tiny forms: so many steps, or pictures")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="compare kernels with torch, and run nothing")
    parser.add_argument("--probe", action="store_true", help="time some steps of each task, and write nothing")
    parser.add_argument("--list", action="store_true", help="say what is missing, and run nothing")
    options = parser.parse_args()
    options.kernels = options.kernels and options.device == "cuda"
    deadline = time.monotonic() + 60 * options.minutes
    if options.limit and options.results == RESULTS:
        parser.error("--limit needs --results: its rows do not belong into the tables")
    if options.check or options.probe:
        check(options) if options.check else probe(options)
        return
    todo = missing(options.results, options.only, options.rows)
    guess = Guess(options.results, GPU if options.list else paired.name_of(torch.device(options.device)))
    if options.list:
        for group in todo:
            seconds, known = guess(group.task, len(group.runs)), guess.measured(group.task)
            print(f"{group.task:12} seeds {seeds_of(group):8}  {len(group.runs):2} runs  {seconds:5.0f} s"
                  f"{'' if known else ' (guess)'}")  # fmt: skip
        return
    failures = 0
    of_texts = [group for group in todo if group.task in paired.TEXTS]
    if of_texts:
        failures += texts(of_texts, options, deadline, guess)
    if single := [group for group in todo if group.task in SINGLE]:
        failures += single_runs(single, options, deadline, guess)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
