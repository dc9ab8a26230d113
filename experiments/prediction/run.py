"""Prediction against measurement on emulated networks. Needs root or user namespaces, and a quiet machine.

    python experiments/prediction/run.py               about ten minutes; writes results.csv and the table of README.md
    python experiments/prediction/run.py --models vgg --rates 1gbit --out /tmp/some.csv      a part of it
    python experiments/prediction/run.py --errors      runs nothing: today's model against what was measured, for the
                                                       plans that do not depend on it

1. `gradzip profile` of each model on 4 hosts at 1 Gbit/s, and only there.
2. From these profiles: the step of each plan at each rate, and the planner's own choice.
3. Each plan is run at each rate: two steps to warm up (DDP forms its buckets anew), then three that count.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradzip import emulate
from gradzip.option import Option
from gradzip.plan import Plan
from gradzip.planner.answer import Request, answer
from gradzip.planner.choices import Limits
from gradzip.planner.network import Topology
from gradzip.planner.profile import Profile
from gradzip.planner.timeline import CPU
from gradzip.routes import Route

HERE = Path(__file__).parent
MODELS = ("cnn", "vgg", "gpt")
PROFILED = "1gbit"
RATES = ("100mbit", PROFILED, "2.5gbit")
HOSTS = 4
CODECS = ("gcomp:mode=lossless", "gcomp:keep=7", "cast:to=bf16", "topk")
FIXED = {
    "lossless": ("gcomp:mode=lossless", "alltoall"),
    "keep7": ("gcomp:keep=7", "alltoall"),
    "bf16": ("cast", "alltoall"),
}
WARM, REPEATS = 2, 3


def ranks(*argv: str, rate: str) -> list[str]:
    lines: list[str] = []
    result = emulate.run([sys.executable, *argv], hosts=HOSTS, rate=rate, on_line=lambda line: lines.append(str(line)))
    if result.exit_code:
        raise SystemExit("\n".join(lines[-20:]))
    return lines


def profiles(models: Sequence[str], folder: Path, again: bool) -> dict[str, Profile]:
    found = {}
    for model in models:
        kept, path = HERE / f"profile-{model}.json", folder / f"{model}.json"
        if not (again and kept.exists()):
            codecs = [word for codec in CODECS for word in ("--codec", codec)]
            script = [sys.executable, str(HERE / "replay.py"), "--model", model, "--steps", "1000"]
            wanted = ["--steps", "15", "--out", str(path), "--inter", PROFILED, *codecs, "--", *script]
            ranks("-m", "gradzip", "profile", *wanted, rate=PROFILED)
            replace(Profile.load(path), model=model).save(kept)
        found[model] = Profile.load(kept)
    return found


def fixed_plan(profile: Profile, codec: str, route: str) -> Plan:
    option = Option(codec, None, str(Route.parse(route)))
    return Plan({t.name: option for t in profile.tensors}, {t.name: t.shape for t in profile.tensors}, profile.model)


def predictions(profile: Profile, topology: Topology, folder: Path) -> dict[str, tuple[float, float]]:
    """By plan: the step's seconds, and those that coding and sockets take of a rank's cores. Writes the plans."""
    request = Request(profile, topology, Limits(lossy=True, codecs=CODECS))
    found = answer(request)
    predicted = {"plain": (found.plain_s, 0.0)}
    for label, (codec, route) in FIXED.items():
        plan = found.problem.uniform(Option(codec, None, str(Route.parse(route))))
        cpu_s = found.problem.timeline(plan).busy_s(CPU) * found.problem.network.cores
        predicted[label] = found.problem.step_s(plan), cpu_s
        fixed_plan(profile, codec, route).save(folder / f"{label}-{profile.model}.json")
    for label, limits in (("planned", Limits(codecs=CODECS[:1])), ("planned-lossy", request.limits)):
        chosen = answer(Request(profile, topology, limits))
        cpu_s = chosen.timeline.busy_s(CPU) * chosen.problem.network.cores if chosen.pays else 0.0
        predicted[label] = (chosen.step_s if chosen.pays else chosen.plain_s), cpu_s
        chosen.to_plan().save(folder / f"{label}-{profile.model}.json")
    return predicted


def measured(models: Sequence[str], plans: Sequence[str], rate: str, folder: Path) -> Iterator[dict[str, Any]]:
    """All plans of all models in one launch."""
    files = ["plain" if label == "plain" else str(folder / f"{label}-{{}}.json") for label in plans]
    script = [str(HERE / "replay.py"), "--model", *models, "--steps", str(WARM + REPEATS), "--plans", *files]
    for line in ranks(*script, rate=rate):
        if '"step_s"' in line:
            result = json.loads(line[line.index("{") :])
            yield {**result, "plan": result["plan"].removeprefix(f"{folder}/").removesuffix("-{}.json")}


def main(models: Sequence[str], rates: Sequence[str], out: Path, again: bool) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiled = profiles(models, folder, again)
        for rate in rates:
            topology = Topology(HOSTS, 1, float(emulate.parse_rate(rate)))
            predicted = {model: predictions(profile, topology, folder) for model, profile in profiled.items()}
            for result in measured(models, list(predicted[models[0]]), rate, folder):
                step_s, cpu_s = predicted[result["model"]][result["plan"]]
                times = result["step_s"][WARM:]
                rows.append(
                    {
                        "model": result["model"],
                        "rate": rate,
                        "plan": result["plan"],
                        "predicted_s": round(step_s, 4),
                        "measured_s": round(statistics.median(times), 4),
                        "least_s": round(min(times), 4),
                        "most_s": round(max(times), 4),
                        "predicted_cpu_s": round(cpu_s, 4),
                        "measured_cpu_s": round(statistics.median(result["cpu_s"][WARM:]), 4),
                    }
                )
                print(rows[-1], flush=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def summary(rows: list[dict[str, str]]) -> list[str]:
    """Errors of the prediction, and how far the planner's choice is from the best plan that was measured."""
    errors = [abs(float(r["predicted_s"]) / float(r["measured_s"]) - 1) for r in rows]
    lines = [f"step time: median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %"]
    for model, rate in sorted({(r["model"], r["rate"]) for r in rows}):
        own = {r["plan"]: float(r["measured_s"]) for r in rows if (r["model"], r["rate"]) == (model, rate)}
        best = min(own, key=own.__getitem__)
        lines.append(
            f"{model} at {rate}: chosen {own['planned-lossy']:.3f} s, best ({best}) {own[best]:.3f} s, "
            f"plain {own['plain']:.3f} s, lossless choice {own['planned']:.3f} s"
        )
    return lines


def errors(rows: list[dict[str, str]]) -> list[str]:
    """What the model says now, from the profiles that are kept, beside what was measured then."""
    found: dict[str, list[float]] = {rate: [] for rate in RATES}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for model, profile in profiles(sorted({r["model"] for r in rows}), Path(folder), again=True).items():
            for rate in RATES:
                topology = Topology(HOSTS, 1, float(emulate.parse_rate(rate)))
                predicted = predictions(profile, topology, Path(folder))
                for row in rows:
                    if (row["model"], row["rate"]) == (model, rate) and row["plan"] in ("plain", *FIXED):
                        error = predicted[row["plan"]][0] / float(row["measured_s"]) - 1
                        found[rate].append(abs(error))
                        lines.append(f"{model} {rate} {row['plan']}: {100 * error:+.1f} %")
    found["all"] = list(itertools.chain(*found.values()))
    for rate, those in found.items():
        lines.append(f"{rate}: median {100 * statistics.median(those):.1f} %, worst {100 * max(those):.1f} %")
    return lines


def read(path: Path = HERE / "results.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def filled(text: str) -> str:
    """README.md with its table made anew."""
    rows = read()
    lines = [f"{summary(rows)[0]}.", "", "| model | rate | plan | predicted s | measured s | spread | error |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in rows:
        error = 100 * (float(r["predicted_s"]) / float(r["measured_s"]) - 1)
        times = f"{float(r['predicted_s']):.2f} | {float(r['measured_s']):.2f}"
        spread = f"{float(r['least_s']):.2f}–{float(r['most_s']):.2f}"
        lines.append(f"| {r['model']} | {r['rate']} | {r['plan']} | {times} | {spread} | {error:+.0f} % |")
    before, _, rest = text.partition("<!-- table -->\n")
    after = rest.partition("\n<!-- end -->")[2]
    return f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    parser.add_argument("--again", action="store_true", help="with the profiles that are there")
    parser.add_argument("--tables", action="store_true", help="only the table of README.md")
    parser.add_argument("--errors", action="store_true", help="only what the model says now of what was measured")
    args = parser.parse_args()
    if args.errors:
        raise SystemExit(print(*errors(read(args.out)), sep="\n"))
    if not args.tables:
        main(args.models, args.rates, args.out, args.again)
    print(*summary(read(args.out)), sep="\n")
    if args.out == HERE / "results.csv":
        readme = HERE / "README.md"
        readme.write_text(filled(readme.read_text()))
