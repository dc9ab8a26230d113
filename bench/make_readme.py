"""Writes the table in README.md ("your network and model: what to write, what you get") from committed results.

    python bench/make_readme.py

The files that it reads, and the commands that wrote them:
    bench/results/steps_cpu.csv     bench/steps.py (bench/make_tables.py names the commands)
    bench/results/demo.json         gradzip demo --json
    experiments/gpt/results.csv     experiments/real_ranks.sh
    experiments/gcomp/times.csv     experiments/real_ranks.sh
    bench/results/exchange_gpu.csv  bench/exchange_gpu.py, which compares with torch's BF16 hook alone
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- table: python bench/make_readme.py -->\n", "<!-- end of table -->\n"

STEPS, DEMO = "bench/results/steps_cpu.csv", "bench/results/demo.json"
GPT, TIMES = "experiments/gpt/results.csv", "experiments/gcomp/times.csv"
STREAM = "bench/results/exchange_gpu.csv"
NEAR, KEEP, LOW_RANK, DEFAULT = "gcomp", "gcomp:keep=7", "powersgd:rank=4", "noise"  # all trained by AdamW or SGD
TORCH_BF16 = "torch bf16"
WORDS = {
    DEFAULT: "`attach(model, optimizer)`",
    NEAR: '`attach(…, "gcomp")`',
    KEEP: '`attach(…, "gcomp:keep=7")`',
    LOW_RANK: '`attach(…, "powersgd:rank=4")`',
}
ERRORS = {
    DEFAULT: "noise, budget 1 %",
    NEAR: "near-lossless, within 1 ulp",
    KEEP: "BF16's error, two thirds of its bytes",
    LOW_RANK: "low rank; changes training",
}


@dataclass(frozen=True)
class Case:
    """Rows of one results file that were measured under the same conditions."""

    words: str
    file: str
    where: dict[str, str]
    policies: tuple[str, ...]

    def column(self, name: str) -> dict[str, float]:
        """A column of these rows, by policy."""
        with (ROOT / self.file).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if all(row[k] == v for k, v in self.where.items())]
        return {row.get("what") or row["policy"]: float(row[name]) for row in rows if row[name]}

    def milliseconds(self) -> dict[str, float]:
        """Of a step, by policy."""
        if self.file == DEMO:
            rows = json.loads((ROOT / DEMO).read_text())["rows"]
            return {row["run"].replace("plain DDP", "plain"): float(row["step ms"]) for row in rows}
        return self.column("ms" if self.file == STREAM else "median_ms")


CASES = (
    Case("100 Mbit/s, CPUs, perceptron of 20 M", STEPS, {"network": "4 x 100 Mbit/s"}, (NEAR, LOW_RANK)),
    Case("1 Gbit/s, CPUs, the demo's model of 2.8 M", DEMO, {}, (DEFAULT, KEEP)),
    Case("1 Gbit/s, GPUs, GPT-2 of 124 M", GPT, {"network": "1 Gbit/s"}, (DEFAULT, LOW_RANK)),
    Case("10 Gbit/s, GPUs, GPT-2 of 124 M", GPT, {"network": "10 Gbit/s"}, (DEFAULT, LOW_RANK)),
    Case("10 Gbit/s, GPUs, fine-tuning MiniLM of 22 M", TIMES, {"task": "gcomp-sst2-adamw"}, (NEAR,)),
)
STREAMED = {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "gpt2": "GPT-2"}  # by the stream runner


def stream_row() -> str:
    """Noise against torch's BF16 hook: plain DDP was not timed in these runs."""
    gains, shares = [], []
    for model in STREAMED:
        case = Case("", STREAM, {"model": model, "hosts": "4", "layout": "channels_last"}, ())
        found = case.milliseconds()
        gains.append(f"{found[TORCH_BF16] / found[DEFAULT]:.1f}x")
        shares.append(f"{100 * case.column('share')[DEFAULT]:.1f}")
    error = f"zero-mean noise: {' / '.join(shares)} %, budget 1 %"
    cells = [f"10 Gbit/s, GPUs, {' / '.join(STREAMED.values())}", WORDS[DEFAULT], error]
    cells += [f"**{' / '.join(gains)}** over BF16", "1.0x"]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    lines = [
        "| your network and model | what to write | what it keeps | speed-up of a step | torch's BF16 hook |",
        "|---|---|---|---|---|",
    ]
    for case in CASES:
        found = case.milliseconds()
        plain = found["plain"]
        for policy in case.policies:
            first = policy == case.policies[0]
            bf16 = f"{plain / found[TORCH_BF16]:.1f}x" if TORCH_BF16 in found else "not run"
            gain = f"**{plain / found[policy]:.1f}x**"
            cells = [case.words if first else "", WORDS[policy], ERRORS[policy], gain, bf16 if first else ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, stream_row()]) + "\n"


def filled(readme: str) -> str:
    """The README with the table as it is made now."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main() -> None:
    README.write_text(filled(README.read_text()))


if __name__ == "__main__":
    main()
