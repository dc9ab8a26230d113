"""The workloads of Espresso (EuroSys'23, Figures 12 and 13) on our cost models, beside the published gains.

    python experiments/espresso/run.py       writes results.csv, and the tables of README.md

64 V100 on 8 machines. What the paper does not print is assumed here, in one place.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

from gradzip.codecs import parse
from gradzip.planner import models
from gradzip.planner.answer import Answer, Request, answer
from gradzip.planner.choices import Limits
from gradzip.planner.network import Network, Topology
from gradzip.planner.problem import Problem
from gradzip.planner.profile import CodecCost, Curve, Profile
from gradzip.planner.units import tensors

HERE = Path(__file__).parent
WORLD = 64
MIB = 1 << 20

# Assumed: GPU coding by latency and rate (several kernels, error feedback included), CPU coding at the rate of the
# public artifact (20 Gbit/s), the published sizes of payloads. Sums are coded again to the same size, as in the paper.
CODECS = {
    "randomk": ("randomk", 100.0, 60e-6, 60e9),
    "dgc": ("dgc", 50.0, 150e-6, 20e9),
    "efsignsgd": ("sign", 32.0, 80e-6, 50e9),
}
CPU_BYTES_PER_S = 2.5e9
INTRA = {"NVLink": 400e9, "PCIe": 48e9}  # bit/s that get through between GPUs of a machine


@dataclass(frozen=True)
class Workload:
    model: str
    codec: str
    links: str
    batch: float  # samples of a GPU per step, in the paper's unit of throughput
    fp32: float  # published throughput of 64 GPUs; read off figures
    bound: float
    espresso: float
    scaling: float | None  # published scaling factor of FP32 (Table 1)
    gains: tuple[float | None, float | None, float | None, float | None]  # FP32, BytePS-Compress, HiTopKComm, HiPress
    hipress_least: int = 16 << 20

    @property
    def name(self) -> str:
        return f"{self.model} + {self.codec}, {self.links}"

    @property
    def step_s(self) -> float:
        """FP32's step on 64 GPUs."""
        return self.batch * WORLD / self.fp32

    @property
    def compute_s(self) -> float:
        """A step on one GPU: from the scaling factor, else from the bound, which communication hardly touches."""
        return self.step_s * self.scaling if self.scaling else self.batch * WORLD / self.bound


WORKLOADS = (
    Workload("bert-base", "randomk", "NVLink", 1024, 1.30e5, 2.26e5, 2.08e5, 0.51, (None, 0.31, 0.54, 0.40)),
    Workload("gpt2", "efsignsgd", "NVLink", 80, 6.8e3, 11.3e3, 11.0e3, 0.58, (None, 0.42, None, 0.33)),
    Workload("ugatit", "dgc", "NVLink", 2, 45, 117, 112, None, (1.49, 2.05, 0.50, 0.35)),
    Workload("vgg16", "randomk", "PCIe", 32, 3.3e3, 13.5e3, 12.3e3, None, (2.69, 3.57, None, 0.55)),
    Workload("lstm", "efsignsgd", "PCIe", 80, 9.9e3, 19.2e3, 17.5e3, 0.46, (None, 1.01, 0.73, 0.77)),
    Workload("resnet101", "dgc", "PCIe", 32, 7.8e3, 10.0e3, 9.4e3, None, (0.20, 0.18, None, 0.24), 1 << 20),
)


def profile_of(workload: Workload) -> Profile:
    """The shipped profile, with computing scaled to what the paper implies and its own codec."""
    shipped = models.load(workload.model)
    text, ratio, latency_s, rate = CODECS[workload.codec]
    gpu = Curve(tuple((s, latency_s + s / rate) for s in (64 << 10, MIB, 64 * MIB)))
    cpu = Curve(tuple((s, 20e-6 + s / CPU_BYTES_PER_S) for s in (64 << 10, MIB, 64 * MIB)))
    curves = {"gpu": gpu, "cpu": cpu}
    cost = CodecCost(parse(text), ratio, curves, curves)
    scale = workload.compute_s / (shipped.forward_s + shipped.backward_s + shipped.optimizer_s)
    return replace(
        shipped,
        tensors=tuple(replace(t, ready_s=t.ready_s * scale) for t in shipped.tensors),
        forward_s=shipped.forward_s * scale,
        backward_s=shipped.backward_s * scale,
        optimizer_s=shipped.optimizer_s * scale,
        codecs={str(cost.codec): cost},
    )


def effective_rate(workload: Workload, profile: Profile) -> float:
    """The rate between machines at which FP32 takes as long as published."""

    def plain_s(rate: float) -> float:
        network = Network(profile, Topology(8, 8, rate, INTRA[workload.links]))
        problem = Problem(network, tensors(profile), Limits(codecs=()))
        return problem.step_s(problem.uniform(0))

    low, high = math.log(1e9), math.log(200e9)
    for _ in range(40):
        middle = (low + high) / 2
        if plain_s(math.exp(middle)) > workload.step_s:
            low = middle
        else:
            high = middle
    return math.exp(low)


def plan(workload: Workload) -> tuple[Answer, float]:
    profile = profile_of(workload)
    rate = effective_rate(workload, profile)
    topology = Topology(8, 8, rate, INTRA[workload.links])
    request = Request(profile, topology, Limits(lossy=True), bucket_bytes=None)
    return answer(request, hipress_least=workload.hipress_least), rate


def row(workload: Workload) -> dict[str, object]:
    found, rate = plan(workload)
    efficiency = found.request.profile.links["inter"].efficiency
    steps = {b.name: b.step_s for b in found.baselines}
    compared = [steps[name] for name in ("FP32 all-reduce", "BytePS-Compress", "HiTopKComm", "HiPress")]
    result: dict[str, object] = {"workload": workload.name, "fp32_ms": round(found.plain_s * 1e3, 1)}
    result["plan_ms"] = round(found.step_s * 1e3, 1)
    result["effective_gbit"] = round(rate * efficiency / 1e9, 1)
    for name, step_s, published in zip(("fp32", "byteps", "hitopk", "hipress"), compared, _published(workload)):
        assert step_s is not None
        result[f"gain_{name}"] = round(step_s / found.step_s - 1, 3)
        result[f"published_{name}"] = "" if published is None else round(published, 2)
    bound = found.baselines[-1].step_s
    assert bound is not None
    result["off_bound"] = round(found.step_s / bound - 1, 3)
    result["published_off_bound"] = round(workload.bound / workload.espresso - 1, 3)
    result["paper_algorithms_ms"] = round((found.problem.outside_s + found.found.paper_s) * 1e3, 1)
    return result


def _published(workload: Workload) -> tuple[float | None, ...]:
    """Gains as printed; where only the figure has it, FP32's from there."""
    fp32 = workload.gains[0] if workload.gains[0] is not None else workload.espresso / workload.fp32 - 1
    return (fp32, *workload.gains[1:])


def table(rows: list[dict[str, str]]) -> str:
    def percent(text: str) -> str:
        return f"{100 * float(text):.0f} %" if text else "–"

    lines = [
        "| workload | effective Gbit/s | over FP32 | BytePS-Compress | HiTopKComm | HiPress | from the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [
            f"{percent(r[f'gain_{n}'])} ({percent(r[f'published_{n}'])})"
            for n in ("fp32", "byteps", "hitopk", "hipress")
        ]
        bound = f"{100 * float(r['off_bound']):.1f} % ({100 * float(r['published_off_bound']):.0f} %)"
        lines.append(f"| {r['workload']} | {r['effective_gbit']} | {' | '.join(cells)} | {bound} |")
    return "\n".join(lines)


def read() -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / "results.csv").read_text().splitlines()))


def filled(text: str, rows: list[dict[str, str]]) -> str:
    """README.md with its table made anew."""
    before, _, rest = text.partition("<!-- table -->\n")
    _, _, after = rest.partition("\n<!-- end -->")
    return f"{before}<!-- table -->\n{table(rows)}\n<!-- end -->{after}"


if __name__ == "__main__":
    rows = [row(workload) for workload in WORKLOADS]
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(), read()))
    print(table(read()))
