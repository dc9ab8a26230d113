"""Speed of the GComp codec on a GPU: checks the round trip, then times encode and decode of the triton engine.

    python bench/gpu_codec.py results.csv --mib 4 16 64 256 1024

Input is synthetic (normal values times log-normal row scales, a tenth of them zero), or the start of real gradients,
parameters and second moments given as raw float32 files, repeated to the size asked for. GB/s are 10^9 bytes of raw
input per second; medians of CUDA events around whole calls with buffers reused and code lengths given, as from a
step before. Inputs that fit into the L2 cache are rotated. The last column is a device copy of the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gradzip.engines import gpu
from gradzip.engines.layout import Floor, Job, body_bound

MIB = 1 << 20
ROTATE = 256 * MIB  # several times the L2 cache


@dataclass(frozen=True)
class Data:
    """Gradients with what near mode needs to know, all flat float32 of one length."""

    name: str
    gradient: torch.Tensor
    theta: torch.Tensor
    second: torch.Tensor
    rule: tuple[int, int, int]  # c0, c1, c2 of a Floor at one ulp

    def grown(self, numel: int) -> Data:
        parts = [t.repeat(-(-numel // t.numel()))[:numel] for t in (self.gradient, self.theta, self.second)]
        return Data(self.name, *parts, self.rule)

    def floor(self, ulps_bits: int) -> Floor:
        """The floors at 2^ulps_bits ulps."""
        c0, c1, c2 = self.rule
        return Floor(self.theta, self.second, c0, c1 + 2 * ulps_bits, c2 + 2 * ulps_bits)


def synthetic(numel: int, device: torch.device) -> Data:
    """As in late training under AdamW: about 12 mantissa bits matter at one ulp."""
    torch.manual_seed(0)
    width = 1024
    scale = torch.exp(1.5 * torch.randn(-(-numel // width), 1, device=device)) * 1e-4
    noise = torch.randn(scale.shape[0], width, device=device)
    gradient = (noise * scale).reshape(-1)[:numel]
    gradient[torch.rand(numel, device=device) < 0.1] = 0
    second = (scale * scale * torch.exp(torch.randn(scale.shape[0], width, device=device))).reshape(-1)[:numel]
    theta = 0.05 * torch.randn(numel, device=device)
    return Data("synthetic", gradient, theta, second, (-150, -91, -20))


def from_files(folder: Path, rule: tuple[int, int, int], device: torch.device) -> Data:
    def read(name: str) -> torch.Tensor:
        path = folder / name
        return torch.from_file(str(path), size=path.stat().st_size // 4, dtype=torch.float32).to(device)

    return Data(folder.name, read("g.f32"), read("p.f32"), read("v.f32"), rule)


@dataclass(frozen=True)
class Case:
    mode: str
    job: Job
    dtype: torch.dtype = torch.float32
    ulps_bits: int | None = None


CASES = {
    case.mode: case
    for case in (
        Case("lossless", Job("lossless")),
        Case("keep=7", Job("keep", 7)),
        Case("near", Job("near"), ulps_bits=0),
        Case("near:ulps=256", Job("near"), ulps_bits=8),
        Case("near:ulps=4096", Job("near"), ulps_bits=12),
        Case("near:ulps=65536", Job("near"), ulps_bits=16),
        Case("bf16", Job("lossless"), dtype=torch.bfloat16),
    )
}


def median_ms(call: Callable[[int], object], sets: int, least: int = 9, budget_ms: float = 150.0) -> float:
    """Median time of call(i), i counting through the input sets."""
    for i in range(3):
        call(i % sets)
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget_ms and len(times) < 100):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(len(times) % sets)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(data: Data, case: Case, raw_bytes: int) -> dict[str, object]:
    """One row of the table; raises if the decoded values are not those of the format."""
    item = torch.empty(0, dtype=case.dtype).element_size()
    numel = raw_bytes // item
    sets = max(1, min(16, ROTATE // raw_bytes))
    grown = data.grown(numel)
    # Each set starts elsewhere in the data, so that no two are alike.
    inputs = [grown.gradient.roll(4096 * 37 * i).to(case.dtype) for i in range(sets)]
    floor = grown.floor(case.ulps_bits) if case.ulps_bits is not None else None
    outputs = [torch.empty(body_bound(numel, case.dtype), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    lengths = gpu.code_lengths(gpu.histogram(inputs[0], case.job, floor))
    sizes = [gpu.encode(x, case.job, out, floor, lengths) for x, out in zip(inputs, outputs)]
    bodies = [out[:size] for out, size in zip(outputs, sizes)]
    decoded = torch.empty_like(inputs[0])
    check_round_trip(inputs[0], bodies[0], decoded, case, floor, lengths)

    encode_ms = median_ms(lambda i: gpu.encode(inputs[i], case.job, outputs[i], floor, lengths), sets)
    decode_ms = median_ms(lambda i: gpu.decode(bodies[i], decoded, floor), sets)
    copy_ms = median_ms(lambda i: decoded.copy_(inputs[i]), sets)
    speed = lambda ms: round(raw_bytes / ms / 1e6, 1)  # noqa: E731
    return {
        "data": data.name,
        "mode": case.mode,
        "MiB": raw_bytes // MIB,
        "ratio": round(raw_bytes / sizes[0], 3),
        "encode GB/s": speed(encode_ms),
        "decode GB/s": speed(decode_ms),
        "copy GB/s": speed(copy_ms),
    }


def check_round_trip(
    x: torch.Tensor, body: torch.Tensor, decoded: torch.Tensor, case: Case, floor: Floor | None, lengths: torch.Tensor
) -> None:
    """Lossless modes give the input back; for all, coding what was decoded gives the same bytes again."""
    bits = torch.int32 if x.element_size() == 4 else torch.int16
    decoded.fill_(float("nan"))
    gpu.decode(body, decoded, floor)
    if case.job.mode == "lossless" and not torch.equal(decoded.view(bits), x.view(bits)):
        raise SystemExit(f"{case.mode}: the round trip changed values")
    again = torch.empty_like(body, memory_format=torch.contiguous_format).new_empty(body_bound(x.numel(), x.dtype))
    size = gpu.encode(decoded, case.job, again, floor, lengths)
    if not torch.equal(again[:size], body):
        raise SystemExit(f"{case.mode}: encoding the decoded values gave other bytes")


def tune(data: Data, case: Case, raw_bytes: int) -> None:
    """Prints speeds for other numbers of programs per multiprocessor than those built in."""
    grown = data.grown(raw_bytes // torch.empty(0, dtype=case.dtype).element_size())
    x = grown.gradient.to(case.dtype)
    floor = grown.floor(case.ulps_bits) if case.ulps_bits is not None else None
    out = torch.empty(body_bound(x.numel(), case.dtype), dtype=torch.uint8, device="cuda")
    decoded = torch.empty_like(x)
    lengths = gpu.code_lengths(gpu.histogram(x, case.job, floor))
    body = out[: gpu.encode(x, case.job, out, floor, lengths)]
    calls: dict[str, Callable[[int], object]] = {
        "MEASURE_PROGRAMS": lambda _: gpu.encode(x, case.job, out, floor, lengths),
        "WRITE_PROGRAMS": lambda _: gpu.encode(x, case.job, out, floor, lengths),
        "DECODE_PROGRAMS": lambda _: gpu.decode(body, decoded, floor),
    }
    for name, call in calls.items():
        built_in = getattr(gpu, name)
        speeds = []
        for programs in (8, 12, 16, 20, 24, 28, 32):
            setattr(gpu, name, programs)
            speeds.append(f"{programs}: {raw_bytes / median_ms(call, 1, 5, 20.0) / 1e6:.0f}")
        setattr(gpu, name, built_in)
        print(f"{case.mode:>16} {name:>17} (now {built_in})  GB/s at {'  '.join(speeds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--modes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tune", action="store_true", help="also try other numbers of programs at the last size")
    parser.add_argument("--folder", type=Path, help="with g.f32, p.f32 and v.f32; default: synthetic data")
    parser.add_argument("--rule", type=int, nargs=3, default=(-150, -91, -20), help="c0 c1 c2 of the floors at one ulp")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for mib in options.mib:
        if options.folder:
            data = from_files(options.folder, tuple(options.rule), device)
        else:
            data = synthetic(mib * MIB // 2, device)
        for mode in options.modes:
            row = measure(data, CASES[mode], mib * MIB)
            rows.append(row)
            print("  ".join(f"{value!s:>16}" for value in row.values()), flush=True)
            with options.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
    if options.tune:
        for mode in options.modes:
            tune(data, CASES[mode], options.mib[-1] * MIB)
    print("  ".join(f"{name:>16}" for name in rows[0]), f"on {torch.cuda.get_device_name()}", file=sys.stderr)


if __name__ == "__main__":
    main()
