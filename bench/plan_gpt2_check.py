"""What the planner says of GPT-2's steps on four ranks that share a GPU beside what they took.

    python bench/plan_gpt2_check.py FOLDER [--csv FILE]        FOLDER: what bench/plan_gpt2.sh wrote

`gcomp` is every matrix near-lossless, `near` and `lossy` are the planner's own plans. All predictions are from the
profile alone.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path

from gradzip.planner.answer import Request
from gradzip.planner.choices import Limits
from gradzip.planner.network import Topology
from gradzip.planner.profile import Profile

NEAR = "enc.gpu > a2a.flat > dec.gpu > enc.gpu > ag.flat > dec.gpu"


def predicted(folder: Path) -> dict[str, float]:
    """Milliseconds of a step."""
    profile = Profile.load(folder / "profile.json")
    tensors = tuple(t for t in profile.tensors if len(t.shape) > 1)  # policies code no others
    matrices = replace(profile, tensors=tensors)
    problem = Request(matrices, Topology.of(profile), Limits(codecs=("gcomp",)), profile.bucket_bytes or 0).problem()
    (number,) = (n for option, n in problem.number.items() if (option.codec, option.route) == ("gcomp", NEAR))
    found = {
        "plain": problem.plain_s,
        "torch bf16": problem.ddp_s(0.5),
        "gcomp": problem.step_s(problem.uniform(number)),
    }
    for name in ("near", "lossy"):
        found[name] = json.loads((folder / f"{name}.json").read_text())["expected"]["step_s"]
    return {what: 1e3 * seconds for what, seconds in found.items()}


def measured(folder: Path) -> dict[str, float]:
    with (folder / "steps.csv").open() as file:
        return {Path(row["what"]).stem: float(row["median_ms"]) for row in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    took = measured(args.folder)
    rows = [["what", "measured_ms", "predicted_ms", "off_percent", "times_fp32"]]
    for what, ms in predicted(args.folder).items():
        off, gain = 100 * (ms / took[what] - 1), took["plain"] / took[what]
        rows.append([what, f"{took[what]:.1f}", f"{ms:.1f}", f"{off:.1f}", f"{gain:.2f}"])
    for row in rows:
        print("".join(f"{cell:>16}" for cell in row))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
