"""The runs that show what a budget of noise costs, in the order of value. experiments/paired.py runs them."""

from __future__ import annotations

from collections.abc import Iterable

from workers.paired import Group, Variant

PLAIN, NUDGED = Variant("plain"), Variant("nudged", nudge=1e-6)


def noise(percent: float, shape: str = "moments") -> Variant:
    suffix = {"moments": "", "none": ", no shape", "momentum": ", shape of momentum"}[shape]
    return Variant(f"noise {percent:g} %{suffix}", "noise", percent / 100, shape)


INT4, SHORTER = Variant("int4, blocks of 32", "integers", bits=4, block=32), Variant("steps / 1.1", length=1 / 1.1)
FEW = (PLAIN, NUDGED, noise(1), noise(10), noise(30))
# Eight runs each, or sixteen with two seeds: compiled once for all groups.
CORE = (PLAIN, NUDGED, noise(1), noise(3), noise(10), noise(30), INT4, SHORTER)
BETA2 = (PLAIN, NUDGED, noise(1), noise(3), noise(10), noise(30), noise(10, "none"), SHORTER)
MUON = (PLAIN, NUDGED, noise(1), noise(10), noise(1, "none"), noise(10, "none"), noise(10, "momentum"), SHORTER)
CONTROLS = (
    Variant("int8, blocks of 256", "integers", bits=8, block=256),
    Variant("int4, blocks of 128", "integers", bits=4, block=128),
    Variant("fp8, rows", "fp8"),
    Variant("BF16", "bf16"),
    noise(10, "none"),
    Variant("gauss 10 %", "gauss", 0.1),
    Variant("batch / 1.14", batch=14 / 16),
    Variant("rate + 20 %", rate=1.2),
)
FURTHER = (
    Variant("gauss 30 %", "gauss", 0.3),
    Variant("batch / 1.33", batch=12 / 16),
    Variant("steps / 1.3", length=1 / 1.3),
    Variant("rate - 20 %", rate=0.8),
)


def _group(task: str, variants: tuple[Variant, ...], seeds: Iterable[int], why: str) -> tuple[Group, str]:
    return Group(task, tuple((seed, variant) for seed in seeds for variant in variants)), why


QUEUE_WITH_REASONS: list[tuple[Group, str]] = [
    _group("gpt", CORE, (0, 1), "the slope under AdamW"),
    _group("gpt-muon", MUON, (0, 1), "which shape suits Muon"),
    _group("gpt", CORE, (2, 3), "narrower interval of the slope"),
    _group("cifar20k", FEW, range(3, 6), "SGD, where pairs diverge by themselves: seeds count"),
    _group("gpt-beta2", BETA2, (0,), "second moments that lag"),
    _group("gpt", CONTROLS, (0,), "other codecs and controls on the same seed"),
    _group("gpt-16", CORE, (0,), "16 workers"),
    _group("gpt", CORE, (4, 5), "narrower interval of the slope"),
    _group("gpt-batch8", CORE, (0,), "more signal than sampling noise"),
    _group("gpt-11m", CORE, (0,), "a larger model"),
    _group("gpt-beta2", BETA2, (1,), "a second seed"),
    _group("gpt", CORE, (6, 7), "narrower interval of the slope"),
    _group("gpt", CONTROLS, (1,), "a second seed of the controls"),
    _group("gpt", FURTHER, (0, 1), "further controls"),
    _group("gpt-muon", MUON, (2, 3), "more seeds"),
    _group("gpt-16", CORE, (1,), "a second seed"),
    _group("cifar20k", FEW, range(6, 16), "narrower interval"),
    _group("gpt-11m", CORE, (1, 2), "more seeds of the larger model"),
]
QUEUE = [group for group, _ in QUEUE_WITH_REASONS]
