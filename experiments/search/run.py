"""How good the search is: against brute force where that is possible, and how long it takes on real models.

python experiments/search/run.py brute      writes brute.csv and offload.csv
python experiments/search/run.py speed      writes speed.csv; times are those of one core's work, the least of five
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from cases import random_problem

from gradzip.planner import models
from gradzip.planner.choices import Limits
from gradzip.planner.network import Network, Topology
from gradzip.planner.problem import Problem
from gradzip.planner.profile import Profile
from gradzip.planner.search import algorithm_1, algorithm_2, offload_exactly, search
from gradzip.planner.units import Unit, buckets, tensors

HERE = Path(__file__).parent
CASES = 1000
REPEATS = 5
# Table 5 of the paper: selection and offloading time in ms, by the same names.
PUBLISHED_MS = {"vgg16": 18, "resnet101": 209, "ugatit": 96, "bert-base": 169, "gpt2": 117, "lstm": 2}


def best_of_all(problem: Problem, options: Iterable[Iterable[int]]) -> float:
    """The shortest time of all plans: options holds what each unit may take."""
    plans = itertools.product(*options)
    return min(problem.evaluator.time(np.array(plan, np.int32)) for plan in plans)


def brute_rows(cases: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Whole searches on up to 4 units with up to 4 compressed choices (and their twins) beside the plain ones."""
    rng = np.random.default_rng(seed)
    for case in range(cases):
        units = int(rng.integers(1, 5))
        problem = random_problem(rng, units, int(rng.integers(1, 5)))
        found = search(problem, exact=True)
        quick = search(problem)
        best = best_of_all(problem, [range(len(problem.choices))] * units)
        yield {
            "case": case,
            "units": units,
            "choices": len(problem.choices),
            "best_s": best,
            "paper_s": found.paper_s,
            "search_s": found.time_s,
            "screened_s": quick.time_s,
        }


def offload_rows(cases: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Algorithm 2 against all 2^n choices of devices, on up to 8 units, from what Algorithm 1 found."""
    rng = np.random.default_rng(seed)
    case = 0
    while case < cases:
        problem = random_problem(rng, int(rng.integers(2, 9)))
        plan, time_s = algorithm_1(problem)
        options = [(int(n),) if (other := problem.offloaded[n]) is None else (int(n), other) for n in plan]
        movable = sum(len(o) > 1 for o in options)
        if movable == 0:
            continue
        _, found = algorithm_2(problem, plan.copy(), time_s)
        _, exact = offload_exactly(problem, plan.copy(), time_s)
        yield {
            "case": case,
            "units": len(plan),
            "movable": movable,
            "best_s": best_of_all(problem, options),
            "algorithm_2_s": found,
            "exact_s": exact,
        }
        case += 1


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The least that it took of a core, in milliseconds, of some repeats: others may use the machine."""
    least, result = math.inf, None
    for _ in range(REPEATS):
        begin = time.process_time()
        result = work()
        least = min(least, (time.process_time() - begin) * 1e3)
    assert result is not None
    return least, result


def speed_rows() -> Iterator[dict[str, Any]]:
    for name in models.names():
        profile = models.load(name)
        for gbit in (100, 25, 10, 1):
            for unit, parts in (("tensor", tensors(profile)), ("bucket", buckets(profile))):
                yield {"model": name, "gbit": gbit, "unit": unit, "units": len(parts), **speed(profile, parts, gbit)}


def speed(profile: Profile, parts: list[Unit], gbit: float) -> dict[str, Any]:
    topology, limits = Topology(8, 8, gbit * 1e9), Limits(codecs=("gcomp:keep=7",))
    built_ms, problem = timed(lambda: Problem(Network(profile, topology), parts, limits))
    first_ms, (plan, first) = timed(lambda: algorithm_1(problem))
    second_ms, _ = timed(lambda: algorithm_2(problem, plan.copy(), first))
    whole_ms, found = timed(lambda: search(problem))
    tensor_wise = len(parts) == len(profile.tensors)
    return {
        "options": problem.primary,
        "tables_ms": round(built_ms, 1),
        "algorithm_1_ms": round(first_ms, 1),
        "algorithm_2_ms": round(second_ms, 1),
        "whole_search_ms": round(whole_ms, 1),
        "published_ms": PUBLISHED_MS.get(profile.model, "") if tensor_wise else "",
        "plain_ms": problem.step_s(problem.uniform(0)) * 1e3,
        "paper_ms": (problem.outside_s + found.paper_s) * 1e3,
        "search_ms": (problem.outside_s + found.time_s) * 1e3,
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def summary(rows: list[dict[str, Any]], key: str) -> str:
    distance = np.array([row[key] / row["best_s"] - 1 for row in rows])
    equal = int((distance <= 1e-9).sum())
    largest, mean = 100 * distance.max(), 100 * distance.mean()
    return f"{key}: equal in {equal} of {len(rows)}, largest distance {largest:.2f} %, mean {mean:.3f} %"


def read(name: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader((HERE / name).read_text().splitlines()))
    return [{key: float(text) if key.endswith("_s") else text for key, text in row.items()} for row in rows]


def filled(text: str) -> str:
    """README.md with its tables made anew."""
    brute, offload = read("brute.csv"), read("offload.csv")
    lines = ["| | equal to brute force | largest distance | mean |", "|---|---|---|---|"]
    for name, rows, key in (
        ("the paper's two algorithms", brute, "paper_s"),
        ("the whole search", brute, "search_s"),
        ("the whole search, ten options simulated", brute, "screened_s"),
        ("Algorithm 2 alone, over devices", offload, "algorithm_2_s"),
        ("every set of units, over devices", offload, "exact_s"),
    ):
        distance = np.array([row[key] / row["best_s"] - 1 for row in rows])
        equal = f"{int((distance <= 1e-9).sum())} of {len(rows)}"
        lines.append(f"| {name} | {equal} | {100 * distance.max():.1f} % | {100 * distance.mean():.3f} % |")
    lines += ["", "| model | tensors | Gbit/s | tables ms | algorithms 1 + 2 ms | whole search ms | published ms |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in read("speed.csv"):
        if row["unit"] == "tensor":
            both = float(row["algorithm_1_ms"]) + float(row["algorithm_2_ms"])
            cells = [row["model"], row["units"], row["gbit"], row["tables_ms"], f"{both:.1f}", row["whole_search_ms"]]
            lines.append(f"| {' | '.join(cells)} | {row['published_ms'] or '–'} |")
    before, _, rest = text.partition("<!-- tables -->\n")
    after = rest.partition("\n<!-- end -->")[2]
    return f"{before}<!-- tables -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("brute", "speed", "tables"))
    parser.add_argument("--cases", type=int, default=CASES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    readme = HERE / "README.md"
    if args.what == "tables":
        readme.write_text(filled(readme.read_text()))
    elif args.what == "brute":
        rows = write(HERE / "brute.csv", brute_rows(args.cases))
        for key in ("paper_s", "search_s", "screened_s"):
            print(summary(rows, key))
        rows = write(HERE / "offload.csv", offload_rows(args.cases))
        for key in ("algorithm_2_s", "exact_s"):
            print(summary(rows, key))
    else:
        for row in write(HERE / "speed.csv", speed_rows()):
            print(*(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
