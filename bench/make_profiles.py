"""Writes the profiles that ship with gradzip: src/gradzip/planner/models/*.json.

    python bench/make_profiles.py

Shapes are tables (model_shapes.py). Times of single tensors are computed from their share of the multiply-adds; codec
costs come from bench/results; the network is computed. Every file says so in its `origin`. They are for planning
before there is a cluster: measure your own with `gradzip profile`.
"""

from __future__ import annotations

import csv
from pathlib import Path

from model_shapes import MODELS, Layer

from gradzip.codecs import parse
from gradzip.planner.models import FOLDER
from gradzip.planner.profile import CodecCost, Collective, Curve, Link, Profile, Tensor

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20

# Backward seconds on a V100 in FP32, and where they come from. Batches: 32 images (U-GAT-IT 2), 1024 tokens (BERT),
# 80 sequences (GPT-2, LSTM), as in Espresso (EuroSys'23), Table 4.
TRACE = "the trace in Espresso's public artifact (V100, FP32)"
BACKWARD = {
    "vgg16": (0.085, TRACE),
    "gpt2": (0.211, TRACE),
    "lstm": (0.0715, TRACE),
    "ugatit": (0.434, TRACE),
    "resnet101": (
        0.137,
        "two thirds of the step that Espresso's upper bound implies (Figure 13: 10.0e3 images/s on 64 V100)",
    ),
    "resnet50": (0.072, "ResNet-101's, by multiply-adds"),
    "bert-base": (
        0.171,
        "two thirds of the step that FP32's throughput and scaling factor imply in Espresso (Table 1)",
    ),
}
LAUNCH_S = 5e-6  # for a tensor without work to speak of
OPTIMIZER_BYTES_PER_S = 700e9 / 5  # five passes over the parameters at a V100's memory rate

HOSTS, LOCAL = 8, 8
INTER, INTRA = 100e9, 1200e9  # bit/s: 100 Gbit/s Ethernet, NVLink
INTER_EFFICIENCY = 0.9
INTER_ROUND_S, INTRA_ROUND_S = 20e-6, 4e-6
COPY_BYTES_PER_S, COPY_LATENCY_S = 12e9, 10e-6
SIZES = (64 << 10, MIB, 16 * MIB, 256 * MIB)

OFFERED = ("gcomp:mode=lossless", "gcomp:keep=7", "gcomp", "gcomp:ulps=256", "gcomp:ulps=65536")


def ready_times(layers: list[Layer], backward_s: float) -> dict[str, float]:
    """Gradients become ready from the last layer to the first; shared embeddings with the first."""
    work = sum(layer.work for layer in layers)
    spare = backward_s - LAUNCH_S * len(layers)
    clock, ready = 0.0, {}
    for layer in [*(x for x in reversed(layers) if not x.last), *(x for x in layers if x.last)]:
        clock += LAUNCH_S + spare * layer.work / work
        ready[layer.name] = min(clock, backward_s)
    return ready


def _rows(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((RESULTS / name).read_text().splitlines()))


def _points(rows: list[dict[str, str]], kind: str) -> list[tuple[float, float]]:
    """Bytes and seconds."""
    sizes = [float(row["mib"]) * MIB for row in rows]
    return [(size, size / float(row[f"{kind}_gbps"]) / 1e9) for size, row in zip(sizes, rows)]


def codecs() -> dict[str, CodecCost]:
    gpu: dict[str, list[dict[str, str]]] = {}
    for row in _rows("gpu_codec.csv"):
        if row["codec"] in OFFERED and row["chunks"] == "1":
            gpu.setdefault(row["codec"], []).append(row)
    cpu = {row["codec"]: row for row in _rows("cpu_codec.csv") if "avx512" in row["engine"]}
    found = {}
    for text, rows in gpu.items():
        curves = {}
        for kind in ("encode", "decode"):
            points = _points(rows, kind)
            curves[kind] = {"gpu": Curve(tuple(points))}
            if text in cpu:
                size = float(cpu[text]["values"]) * 4
                seconds = size / float(cpu[text][f"{kind}_gbps"]) / 1e9
                curves[kind]["cpu"] = Curve(((size, seconds),))
        codec = parse(text)
        found[str(codec)] = CodecCost(codec, float(rows[-1]["ratio"]), curves["encode"], curves["decode"])
    copy = _points(gpu["gcomp"], "copy")
    cast = parse("cast:to=bf16")
    found[str(cast)] = CodecCost(cast, 2.0, {"gpu": Curve(tuple(copy))}, {"gpu": Curve(tuple(copy))})
    return found


def collectives() -> list[Collective]:
    """What links of those rates and latencies give; the same formulas as in planner/network.py, at 8 hosts of 8."""
    found = []
    for group, peers, round_s, s_per_byte in (
        ("inter", HOSTS, INTER_ROUND_S, LOCAL * 8 / (INTER * INTER_EFFICIENCY)),
        ("intra", LOCAL, INTRA_ROUND_S, 8 / INTRA),
    ):
        for kind, rounds, factor in (
            ("ar", 6, 2 * (peers - 1) / peers),
            ("rs", peers - 1, (peers - 1) / peers),
            ("a2a", peers - 1, (peers - 1) / peers),
            ("ag", peers - 1, peers - 1),
            ("gat", peers - 1, peers - 1),
            ("red", 3, 1),
            ("bc", 3, 1),
        ):
            points = tuple((size, rounds * round_s + factor * s_per_byte * size) for size in SIZES)
            found.append(Collective(kind, group, peers, Curve(points)))
    return found


def make(name: str) -> Profile:
    layers = list(MODELS[name]())
    backward_s, source = BACKWARD[name]
    ready = ready_times(layers, backward_s)
    tensors = [Tensor(layer.name, layer.shape, ready[layer.name]) for layer in layers]
    size = sum(t.size_bytes for t in tensors)
    copies = Curve(tuple((s, COPY_LATENCY_S + s / COPY_BYTES_PER_S) for s in SIZES))
    return Profile(
        model=name,
        tensors=tuple(sorted(tensors, key=lambda t: t.ready_s)),
        forward_s=backward_s / 2,
        backward_s=backward_s,
        optimizer_s=size / OPTIMIZER_BYTES_PER_S,
        hosts=HOSTS,
        ranks_per_host=LOCAL,
        transport="nccl",
        codecs=codecs(),
        collectives=tuple(collectives()),
        links={"inter": Link(INTER * INTER_EFFICIENCY, INTER), "intra": Link(INTRA, INTRA)},
        copies={"host_to_device": copies, "device_to_host": copies},
        origin={
            "made_by": "bench/make_profiles.py",
            "tensors": "shapes: tables of the published architecture; order and times: computed from multiply-adds",
            "backward_s": source,
            "forward_s": "computed: half of backward",
            "optimizer_s": "computed: five passes over the parameters",
            "codecs": "measured: bench/results/gpu_codec.csv (H200) and cpu_codec.csv (one core); cast: a device copy",
            "ratios": "measured on gradients of another model, a small GPT",
            "collectives": "computed: latency and rate of the links, no measurement",
            "copies": "computed: 12 GB/s",
        },
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        make(name).save(FOLDER / f"{name}.json")
        print(FOLDER / f"{name}.json")
