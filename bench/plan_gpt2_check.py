"""What the planner says of GPT-2's steps on four ranks that share an H200 beside what they took.

    python bench/plan_gpt2_check.py [--csv FILE]

The profile (results/plan_gpt2_profile.json) was made before the planner measured DDP's all-reduce apart, the cores of a
rank, threads by the clock and gradients before they are averaged. What such a measurement would have given is put in by
hand here, from other files of the same day; exchanges by Gloo, coding and the times of backward are the profile's. The
last column is the same without any of that.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from gradzip.codecs import parse
from gradzip.planner.answer import Request
from gradzip.planner.choices import Limits
from gradzip.planner.network import Topology
from gradzip.planner.problem import Problem
from gradzip.planner.profile import CodecCost, Collective, Curve, Profile

RESULTS = Path(__file__).parent / "results"
CHUNK_S = 1e-3  # what collectives/layout.py says of a chunk on a GPU's host
CORES = 16 / 4
WAYS = {
    "gcomp:mode=lossless": "enc.gpu > a2a.flat > dec.gpu > enc.gpu > ag.flat > dec.gpu",
    "gcomp": "enc.gpu > a2a.flat > dec.gpu > enc.gpu > ag.flat > dec.gpu",
    "gcomp:keep=7": "enc.gpu > a2a.flat > dec.gpu > enc.gpu > ag.flat > dec.gpu",
    "powersgd:rank=4": "factors",
    "topk": "enc.gpu > ag.flat > dec.gpu",
}


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def measured() -> dict[str, dict[str, str]]:
    """Rows of steps, by the canonical codec."""
    found = {row["what"]: row for row in rows_of("steps_gpu.csv") if row["ranks"] == "4"}
    found["topk"] = found["topk:ratio=0.01"]
    return found


def matrices(profile: Profile) -> Profile:
    """Policies code matrices alone; the rest is a thousandth of the bytes."""
    kept = tuple(t for t in profile.tensors if len(t.shape) > 1)
    names = {t.name for t in kept}
    codecs = {
        text: replace(cost, ratios={n: r for n, r in cost.ratios.items() if n in names})
        for text, cost in profile.codecs.items()
    }
    return replace(profile, tensors=kept, codecs=codecs)


def with_ratio(cost: CodecCost, both: float) -> CodecCost:
    """The profile has the ratio of means; what a rank sends first has the one that makes up the ratio of the run."""
    own = 1 / (2 / both - 1 / cost.ratio)
    ratios = {name: ratio * own / cost.ratio for name, ratio in cost.ratios.items()}
    return replace(cost, ratio=own, ratios=ratios, sum_ratios=cost.ratios)


def mended(profile: Profile) -> Profile:
    nccl = [(4096.0, profile.collectives[0].curve.points[0][1])]
    nccl += [
        (1e6 * float(row["megabytes"]), 1e-3 * float(row["ms"]))
        for row in rows_of("transports.csv")
        if row["way"] == "nccl_all_reduce"
    ]
    (by_gloo,) = (
        (float(row["bytes"]) / 2, 1e-3 * float(row["milliseconds"]))
        for row in rows_of("net_gpu.csv")
        if (row["codec"], row["route"], row["bytes"]) == ("cast", "allreduce", "262144000")
    )
    collectives = [c for c in profile.collectives if c.kind != "ar"]
    collectives += [Collective("ar", "inter", 4, Curve((by_gloo,)))]
    collectives += [Collective("ddp", "inter", 4, Curve(tuple(nccl)))]
    ran, codecs = measured(), dict(profile.codecs)
    for text in ("gcomp", "gcomp:mode=lossless"):
        codecs[text] = with_ratio(codecs[text], float(ran[text]["ratio"]))
    return replace(profile, collectives=tuple(collectives), codecs=codecs, chunk_s=CHUNK_S, cores_per_rank=CORES)


def with_keep(profile: Profile) -> Profile:
    """keep=7 was not profiled: as costly as lossless coding, with the ratio of the run."""
    ratio = float(measured()["gcomp:keep=7"]["ratio"])
    cost = replace(profile.codecs["gcomp:mode=lossless"], codec=parse("gcomp:keep=7"), ratio=ratio, ratios={})
    return replace(profile, codecs={**profile.codecs, "gcomp:keep=7": replace(cost, sum_ratios={})})


def predicted(profile: Profile) -> dict[str, float]:
    """Milliseconds of a step."""
    limits = Limits(codecs=tuple(profile.codecs))
    problem: Problem = Request(profile, Topology.of(profile), limits, profile.bucket_bytes or 0).problem()
    found = {"plain": problem.plain_s, "torch bf16": problem.ddp_s(0.5)}
    for option, number in problem.number.items():
        if WAYS.get(option.codec) == option.route:
            found[option.codec] = problem.step_s(problem.uniform(number))
    return {what: 1e3 * seconds for what, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    profile = matrices(Profile.load(RESULTS / "plan_gpt2_profile.json"))
    before, after, ran = predicted(with_keep(profile)), predicted(with_keep(mended(profile))), measured()
    rows = []
    for what, ms in after.items():
        took = float(ran[what]["median_ms"])
        off = 100 * (ms / took - 1)
        rows.append([what, f"{took:.1f}", f"{ms:.1f}", f"{off:.1f}", f"{before[what]:.1f}"])
    rows.insert(0, ["what", "measured_ms", "predicted_ms", "off_percent", "predicted_as_recorded_ms"])
    for row in rows:
        print("".join(f"{cell:>26}" for cell in row))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
