"""What still needs a GPU, in the order of value: says it, runs the next of it, takes in what came back.

    python experiments/run_queue.py                                       # what is done, what comes next, how long
    python experiments/run_queue.py --run --data DATA --seconds 570 --later 1140 --out OUT     # the next ones
    python experiments/run_queue.py --take OUT                            # appends the rows that came back
    python experiments/run_queue.py --write                               # writes queue.md

`--run` needs nothing but Python and torch, and works with what the call before has left in `--state`: rows, and runs
that were broken off. `--seconds` is the time of this call, `--later` that of further calls on the same machine: no run
is begun that would not end in both together. OUT gets the new rows alone, after each item. With `--limit 64` it runs
tiny forms of everything that is trained here; their rows stay in the state.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import gpu_minutes  # noqa: E402
import paired  # noqa: E402
import series  # noqa: E402
from noise_section import analysis  # noqa: E402
from pieces import Results  # noqa: E402
from workers.paired import Group  # noqa: E402
from workers.running import Run  # noqa: E402

PAGE, STATE = HERE / "queue.md", HERE.parent / "build/queue"
FILES = (
    *("noise/results.csv", "noise/promise.csv", "powersgd/results.csv", "powersgd/times.csv", "accordion/results.csv"),
    *("gcomp/results.csv", "gcomp/rates.csv", "gcomp/stale.csv", "gcomp/times.csv", "gcomp/allreduce.csv"),
    *("gcomp/scaling.csv", "gpt/results.csv", "wall/results.csv", "wall/routes.csv"),
)
TEXTS = ("wall/routes.txt",)  # what the planner predicts, beside wall/routes.csv
SIDE_BY_SIDE = 2  # long runs at once: they fill a GPU, and end early enough to be worth something
OF_GCOMP = "(near|paper)$"  # paired rows that noise has no part in
ENDING = 15.0  # seconds of a call that are left for writing what came


@dataclass(frozen=True)
class Left:
    """What an item still has to do."""

    done: int
    total: int
    seconds: float
    measured: bool  # else estimated


@dataclass(frozen=True)
class Paired:
    """Rows of noise/rows.py whose name begins like an expression."""

    task: str
    why: str
    topic: str = "noise"
    rows: str = f"(?!{OF_GCOMP})"

    @property
    def name(self) -> str:
        return f"{self.topic}: {self.task}"

    def missing(self, folder: Path) -> list[Group]:
        return paired.missing(folder / "noise/results.csv", f"{self.task}$", self.rows)

    def left(self, folder: Path) -> Left:
        runs = {(seed, v.name) for group in self.missing(Path("/nowhere")) for seed, v in group.runs}
        todo = self.missing(folder)
        missing = len({(seed, v.name) for group in todo for seed, v in group.runs})
        guess = paired.Guess(folder / "noise/results.csv", paired.GPU)
        seconds = _shared(folder / "noise/results.csv", guess, self.task, missing)
        return Left(len(runs) - missing, len(runs), seconds, guess.measured(self.task))

    def command(self, data: Path, state: Path, seconds: float, later: float, limit: int | None) -> list[str]:
        jobs = ["--jobs", str(paired.TOGETHER if self.task in paired.SINGLE else 1)]
        return [
            *("paired.py", f"{self.task}$", "--rows", self.rows, "--data", str(data)),
            *("--minutes", f"{seconds / 60:.3f}", *jobs),
            *("--results", str(state / "noise/results.csv"), *_limit(limit)),
        ]


@dataclass(frozen=True)
class Series:
    """Runs of an experiment's rows.py whose task and row match an expression."""

    name: str
    experiment: str
    only: str
    why: str
    seeds: int = 1
    since: int = 0  # seeds below belong to another item

    def runs(self, folder: Path) -> list[Run]:
        found = series.missing([self.experiment], folder, self.seeds, self.only)
        return [run for run in found if run.seed >= self.since]

    def left(self, folder: Path) -> Left:
        todo, everything = self.runs(folder), self.runs(Path("/nowhere"))
        guess = series.Guess(folder, paired.GPU)
        seconds = sum(guess.left(run, folder / "runs") for run in todo) / SIDE_BY_SIDE
        measured = any(guess.measured(run.task) for run in everything)
        return Left(len(everything) - len(todo), len(everything), seconds, measured)

    def command(self, data: Path, state: Path, seconds: float, later: float, limit: int | None) -> list[str]:
        return [
            *("series.py", self.experiment, "--only", self.only, "--seeds", str(self.seeds), "--data", str(data)),
            *("--jobs", str(SIDE_BY_SIDE), "--minutes", f"{seconds / 60:.3f}", "--later", f"{later / 60:.3f}"),
            *("--kept", str(state / "runs"), "--results", str(state), *_limit(limit)),
            *(("--epochs", "1") if limit else ()),
        ]


@dataclass(frozen=True)
class Ranks:
    """A part of real_ranks.sh, which is not begun unless it can end."""

    part: str
    file: str
    rows: int  # that it writes
    seconds: float
    why: str
    measured: bool = False
    wanted: tuple[tuple[str, str], ...] = ()  # columns and values that its rows have

    @property
    def name(self) -> str:
        return f"real ranks: {self.part}"

    def left(self, folder: Path) -> Left:
        there = [row for row in paired.read(folder / self.file) if row.get("device") in ("cuda", paired.GPU)]
        done = min(self.rows, sum(all(row[k] == v for k, v in self.wanted) for row in there))
        return Left(done, self.rows, self.seconds * (1 - done / self.rows), self.measured)

    def command(self, data: Path, state: Path, seconds: float, later: float, limit: int | None) -> list[str]:
        return ["real_ranks.sh", str(data), self.part] if limit is None and seconds >= self.left(state).seconds else []


Item = Paired | Series | Ranks


def _shared(results: Path, guess: paired.Guess, task: str, runs: int) -> float:
    """Seconds of a GPU for so many runs: those of single runs are shared with as many as ran beside them."""
    if task not in paired.SINGLE:
        return guess(task, runs)
    rows = [row for row in paired.read(results) if row["task"] == task and row["device"] == paired.GPU]
    if not rows:
        return guess(task, runs) / paired.TOGETHER
    return runs * statistics.fmean(float(row["seconds"]) / int(row["beside"]) for row in rows)


def _limit(limit: int | None) -> Sequence[str]:
    return () if limit is None else ("--limit", str(limit))


_TEN, _ONE = ("network", "10 Gbit/s"), ("network", "1 Gbit/s")
_RANKS = "-300 (rank|accordion [0-9])"
QUEUE: tuple[Item, ...] = (
    Paired("gpt-11m", "what a budget of noise costs a larger model"),
    Paired("sst2", "the same in fine-tuning of a pretrained BERT"),
    Paired("gpt2", "pairs at 124 M parameters, of which the first says little"),
    *(Paired(task, f"near and paper mode in pairs{where}", "gcomp", OF_GCOMP)
      for task, where in (("gpt", ""), ("cifar20k", ", under SGD"), ("gpt-11m", ", on a larger model"))),
    Ranks("promise", "noise/promise.csv", 6, 276, "what noise promises, for AdamW, SGD, Lion, Muon and Adafactor"),
    Ranks("gpt10", "gpt/results.csv", 9, 190, "loss against wall time: noise and torch's PowerSGD", True, (_TEN,)),
    Ranks("resnet10", "wall/results.csv", 7, 130, "the same picture for ResNet-50", wanted=(_TEN,)),
    Series("PowerSGD, 300 epochs: plain, ranks 1, 2, 4", "powersgd", "cifar-300 (plain|rank 1|rank 2|rank 4)$",
           "whether low ranks cost nothing at the paper's 7200 steps"),
    Series("Accordion, 300 epochs: VGG-19bn", "accordion", f"vgg19bn{_RANKS}",
           "whether Accordion ends where the low compression ends"),
    Ranks("gpt1", "gpt/results.csv", 9, 190, "loss against wall time at 1 Gbit/s", True, (_ONE,)),
    Ranks("resnet1", "wall/results.csv", 7, 190, "the same picture for ResNet-50", wanted=(_ONE,)),
    Series("GComp in float32: CIFAR-10, SST-2", "gcomp", "-float32 ", "its own method to the end of training"),
    Paired("gpt", "a second seed of other codecs and controls"),
    Paired("cifar50k", "SGD on all of CIFAR-10, its second task"),
    Paired("cifar20k", "narrower interval under SGD"),
    Series("PowerSGD, 300 epochs: the other compressors", "powersgd", "cifar-300 (rank 7|random|sign|top)",
           "the rest of Table 4"),
    Series("PowerSGD, 90 epochs: LSTM", "powersgd", "wikitext-90", "Table 3's perplexities, to convergence"),
    Series("Accordion, 300 epochs: ResNet-18", "accordion", f"resnet18{_RANKS}", "Table 1 at length"),
    Ranks("routes", "wall/routes.csv", 8, 110, "routes inside and between hosts beside the planner"),
    Ranks("scaling", "gcomp/scaling.csv", 21, 90, "GComp's Figures 16 and 17 on a GPU"),
    Series("Accordion, 300 epochs: SENet", "accordion", f"senet{_RANKS}", "Table 1's net as published"),
    Series("Accordion, 300 epochs: top k", "accordion", "-300 .*top k", "the paper's other compressor"),
    Series("PowerSGD, 300 epochs: two more seeds", "powersgd", "cifar-300 (plain|rank 2)$",
           "three seeds of plain and rank 2", seeds=3, since=1),
)  # fmt: skip


# --- Rows that travel ------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns of a CSV file, and its rows; nothing of one that is not there."""
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or ()), list(reader)


def merge(source: Path, target: Path) -> int:
    """Appends the rows that the target lacks; how many those are. Both must have the same columns."""
    fields, rows = rows_of(source)
    known, there = rows_of(target)
    if known and fields and known != fields:
        raise SystemExit(f"{source} and {target} have other columns: {sorted(set(fields) ^ set(known))}")
    fresh = [row for row in rows if row not in there]
    if fresh:
        series.append(target, fresh, tuple(fields))
    return len(fresh)


def give(state: Path, out: Path, taken: Path = HERE) -> None:
    """Leaves in `out` what the state has and the experiments have not."""
    for name in FILES:
        fields, rows = rows_of(state / name)
        _, known = rows_of(taken / name)
        fresh = [row for row in rows if row not in known and not row.get("limit")]
        if fresh:
            (out / name).unlink(missing_ok=True)
            series.append(out / name, fresh, tuple(fields))
    copy_texts(state, out)


def copy_texts(source: Path, target: Path) -> None:
    for name in TEXTS:
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text((source / name).read_text())


def run(options: argparse.Namespace) -> int:
    """Runs items in their order until the time is up; how many failed."""
    deadline, failures = time.monotonic() + options.seconds - ENDING, 0
    for name in FILES:
        merge(HERE / name, options.state / name)
    environment = os.environ | {"OUT": str(options.state), "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    for item in QUEUE:
        if not re.search(options.only, item.name):
            continue
        left, seconds = item.left(options.state), deadline - time.monotonic()
        if left.done == left.total or seconds < series.SHORTEST:
            continue
        command = item.command(options.data, options.state, seconds, options.later, options.limit)
        if not command:
            print(f"-- {item.name}: no time, it takes {left.seconds:.0f} s", flush=True)
            continue
        print(f"-- {item.name}: {left.total - left.done} to do, {seconds:.0f} s left", flush=True)
        program = ["sh"] if command[0].endswith(".sh") else [sys.executable]
        try:
            ended = subprocess.run(
                [*program, str(HERE / command[0]), *command[1:]], env=environment, timeout=seconds + 10
            )
            failures += ended.returncode != 0
        except subprocess.TimeoutExpired:
            print(f"-- {item.name}: out of time", flush=True)
            failures += 1
        if options.out is not None:
            give(options.state, options.out)
    return failures


# --- What is done, and what comes next -------------------------------------------------------------------------------


def lines(folder: Path = HERE) -> Iterator[tuple[Item, Left]]:
    for item in QUEUE:
        yield item, item.left(folder)


def spent() -> dict[str, float]:
    """GPU minutes in the rows that are there, by table: those of runs side by side are shared."""
    found = {"noise": sum(minutes for _, minutes in gpu_minutes.minutes(Results(HERE)))}
    for name, file in (("GPT-2", "gpt/results.csv"), ("time to accuracy", "gcomp/times.csv")):
        rows = [row for row in paired.read(HERE / file) if row["device"] == paired.GPU]
        found[name] = sum(float(row["seconds"]) / (1 + int(row["beside"])) for row in rows) / 60
    return found


def page() -> str:
    table = []
    for item, left in lines():
        state = "done" if left.done == left.total else f"{left.done} of {left.total}"
        known = "measured" if left.measured else "estimated"
        seconds = "0" if left.done == left.total else f"{left.seconds:.0f} {known}"
        table.append(f"| {item.name} | {state} | {seconds} | {item.why} |")
    text = (HERE / "notes/queue.md").read_text()
    total = sum(left.seconds for _, left in lines())
    needed = "\n".join(_needed(HERE / "noise/results.csv", paired.Guess(HERE / "noise/results.csv", paired.GPU)))
    minutes = ", ".join(f"{name} {figure:.1f}" for name, figure in spent().items())
    return text.format(table="\n".join(table), needed=needed, left=f"{total / 60:.0f}", spent=minutes)


def _needed(results: Path, guess: paired.Guess) -> Iterator[str]:
    """What would bound each task's loss at 1 %; a seed has the runs that the queue gives the task's first."""
    rows, module = paired.read(results), paired.rows_module()
    for task in dict.fromkeys(group.task for group in module.QUEUE):
        found = analysis.slope(rows, task)
        if found is None:
            yield f"| {task} | 0 | | | | | |"
            continue
        first = next(group for group in module.QUEUE if group.task == task)
        each = sum(seed == first.runs[0][0] for seed, _ in first.runs)
        wanted, at_one = analysis.seeds_needed(found.at_one), found.at_one
        runs = each * max(0, wanted - at_one.count) if wanted else 0
        seconds = _shared(results, guess, task, runs)
        spread = f"{analysis.deviation(at_one):.3f}" if at_one.count > 1 else ""
        to_go = f"{runs} | {seconds:.0f}" if wanted else "| "
        yield f"| {task} | {at_one.count} | {at_one} | {spread} | {wanted or 'none is enough'} | {to_go} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run what comes next")
    parser.add_argument("--seconds", type=float, default=570.0, help="of this call")
    parser.add_argument("--later", type=float, default=0.0, help="seconds of further calls with the same --state")
    parser.add_argument("--only", default="", help="items whose name matches this expression, as while data is missing")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that workers/data.py describes")
    parser.add_argument("--state", type=Path, default=STATE, help="what calls leave for each other")
    parser.add_argument("--out", type=Path, help="the folder for new rows")
    parser.add_argument("--limit", type=int, help="tiny forms, to see whether everything works; needs --state")
    parser.add_argument("--take", type=Path, metavar="OUT", help="append the rows that came back")
    parser.add_argument("--write", action="store_true", help="write queue.md")
    options = parser.parse_args()
    if options.limit and options.state == STATE:
        parser.error("--limit needs --state: its rows do not belong to those of other calls")
    if options.run:
        sys.exit(run(options) > 0)
    if options.take is not None:
        for name in FILES:
            if count := merge(options.take / name, HERE / name):
                print(f"{name}: {count} rows")
        copy_texts(options.take, HERE)
    if options.write or options.take is not None:
        PAGE.write_text(page())
        return
    for item, left in lines():
        known = "" if left.measured else " (estimated)"
        print(f"{item.name:52} {left.done:3} of {left.total:3}  {left.seconds:6.0f} s{known}  {item.why}")


if __name__ == "__main__":
    main()
