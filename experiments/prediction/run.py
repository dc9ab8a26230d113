"""Prediction against measurement on emulated networks. Needs root or user namespaces; takes about ten minutes.

    python experiments/prediction/run.py [--again]     --again: with the profiles that are there
    python experiments/prediction/run.py --tables      only the table of README.md

1. `gradzip profile` of each model on 4 hosts at 1 Gbit/s, and only there.
2. From these profiles: the step of each plan at 100 Mbit/s, 1 and 2.5 Gbit/s, and the planner's own choice for each.
3. Each plan is run at each rate, three times. Everything is written to results.csv.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from gradzip import emulate
from gradzip.option import Option
from gradzip.plan import Plan
from gradzip.planner.answer import Request, answer
from gradzip.planner.choices import Limits
from gradzip.planner.network import Topology
from gradzip.planner.profile import Profile
from gradzip.routes import Route

HERE = Path(__file__).parent
MODELS = ("cnn", "vgg", "gpt")
RATES = ("100mbit", "1gbit", "2.5gbit")
HOSTS = 4
CODECS = ("gcomp:mode=lossless", "gcomp:keep=7", "cast:to=bf16", "topk")
FIXED = {
    "lossless": ("gcomp:mode=lossless", "alltoall"),
    "keep7": ("gcomp:keep=7", "alltoall"),
    "bf16": ("cast", "alltoall"),
}
WARM, REPEATS = 1, 3


def ranks(*argv: str, rate: str) -> list[str]:
    lines: list[str] = []
    result = emulate.run([sys.executable, *argv], hosts=HOSTS, rate=rate, on_line=lambda line: lines.append(str(line)))
    if result.exit_code:
        raise SystemExit("\n".join(lines[-20:]))
    return lines


def profiles(folder: Path) -> dict[str, Profile]:
    found = {}
    for model in MODELS:
        kept, path = HERE / f"profile-{model}.json", folder / f"{model}.json"
        if "--again" in sys.argv and kept.exists():
            found[model] = Profile.load(kept)
            continue
        codecs = [word for codec in CODECS for word in ("--codec", codec)]
        script = [sys.executable, str(HERE / "replay.py"), "--model", model, "--steps", "1000"]
        wanted = ["--steps", "12", "--out", str(path), "--inter", "1gbit", *codecs, "--", *script]
        ranks("-m", "gradzip", "profile", *wanted, rate="1gbit")
        found[model] = Profile.load(path)
        found[model].save(kept)
    return found


def fixed_plan(profile: Profile, codec: str, route: str) -> Plan:
    option = Option(codec, None, str(Route.parse(route)))
    return Plan({t.name: option for t in profile.tensors}, {t.name: t.shape for t in profile.tensors}, profile.model)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured_at_1gbit = profiles(folder)
        for rate in RATES:
            topology = Topology(HOSTS, 1, float(emulate.parse_rate(rate)))
            predicted: dict[tuple[str, str], float] = {}
            for model, profile in measured_at_1gbit.items():
                request = Request(profile, topology, Limits(lossy=True, codecs=CODECS))
                found = answer(request)
                predicted[model, "plain"] = found.plain_s
                for label, (codec, route) in FIXED.items():
                    number = found.problem.number[Option(codec, None, str(Route.parse(route)))]
                    predicted[model, label] = found.problem.step_s(np.full(len(found.problem.units), number, np.int32))
                    fixed_plan(profile, codec, route).save(folder / f"{label}-{model}.json")
                for label, limits in (("planned", Limits(codecs=CODECS[:1])), ("planned-lossy", request.limits)):
                    chosen = answer(Request(profile, topology, limits))
                    predicted[model, label] = chosen.step_s if chosen.pays else chosen.plain_s
                    shapes = {t.name: t.shape for t in profile.tensors}
                    Plan(chosen.options(), shapes, profile.model).save(folder / f"{label}-{model}.json")
            labels = [*FIXED, "planned", "planned-lossy"]
            plans = ["plain", *(str(folder / f"{label}-{{}}.json") for label in labels)]
            script = [str(HERE / "replay.py"), "--model", *MODELS, "--steps", str(WARM + REPEATS), "--plans", *plans]
            for line in ranks(*script, rate=rate):
                if '"step_s"' not in line:
                    continue
                result = json.loads(line[line.index("{") :])
                label = result["plan"].removeprefix(f"{folder}/").removesuffix("-{}.json")
                times = result["step_s"][WARM:]
                rows.append(
                    {
                        "model": result["model"],
                        "rate": rate,
                        "plan": label,
                        "predicted_s": round(predicted[result["model"], label], 4),
                        "measured_s": round(statistics.median(times), 4),
                        "least_s": round(min(times), 4),
                        "most_s": round(max(times), 4),
                    }
                )
                print(rows[-1], flush=True)
    with (HERE / "results.csv").open("w", newline="") as file:
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


def read() -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / "results.csv").read_text().splitlines()))


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
    if "--tables" not in sys.argv:
        main()
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text()))
    print(*summary(read()), sep="\n")
