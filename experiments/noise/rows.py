"""The runs that show what a budget of noise costs, in the order of value. experiments/paired.py runs them."""

from __future__ import annotations

from workers.paired import Group, Variant

PLAIN, NUDGED = Variant("plain"), Variant("nudged", nudge=1e-6)


def noise(percent: float, shape: str = "moments") -> Variant:
    return Variant(f"noise {percent:g} %" + ("" if shape == "moments" else ", no shape"), "noise", percent / 100, shape)


CORE = (PLAIN, NUDGED, noise(1), noise(3), noise(10), noise(30))
FEW = (PLAIN, NUDGED, noise(1), noise(10), noise(30))
CONTROLS = (
    Variant("int8, blocks of 256", "integers", bits=8, block=256),
    Variant("int4, blocks of 32", "integers", bits=4, block=32),
    Variant("int4, blocks of 128", "integers", bits=4, block=128),
    Variant("fp8, rows", "fp8"),
    Variant("BF16", "bf16"),
    noise(10, "none"),
    Variant("gauss 10 %", "gauss", 0.1),
    Variant("gauss 30 %", "gauss", 0.3),
    Variant("batch / 1.14", batch=14 / 16),
    Variant("batch / 1.33", batch=12 / 16),
    Variant("steps / 1.1", length=1 / 1.1),
    Variant("steps / 1.3", length=1 / 1.3),
    Variant("rate - 20 %", rate=0.8),
    Variant("rate + 20 %", rate=1.2),
)


def _groups(task: str, variants: tuple[Variant, ...], seeds: range, why: str) -> list[tuple[Group, str]]:
    return [(Group(task, seed, variants), why) for seed in seeds]


QUEUE_WITH_REASONS: list[tuple[Group, str]] = [
    *_groups("gpt", CORE, range(3), "the slope under AdamW, three seeds first"),
    *_groups("gpt", CONTROLS, range(1), "other codecs and controls on the same seed"),
    *_groups("cifar20k", FEW, range(6), "SGD, where pairs diverge by themselves: seeds count"),
    *_groups("gpt-muon", FEW, range(1), "another optimizer, shape from rows and columns"),
    *_groups("gpt-16", FEW, range(1), "16 workers"),
    *_groups("gpt-beta2", FEW, range(1), "second moments that lag"),
    *_groups("gpt-batch8", FEW, range(1), "more signal than sampling noise"),
    *_groups("gpt", CORE, range(3, 6), "narrower interval of the slope"),
    *_groups("cifar20k", FEW, range(6, 16), "narrower interval"),
    *_groups("gpt", CONTROLS, range(1, 2), "a second seed of the controls"),
    *_groups("gpt-muon", FEW, range(1, 2), "a second seed"),
    *_groups("gpt-16", FEW, range(1, 2), "a second seed"),
    *_groups("gpt-beta2", FEW, range(1, 2), "a second seed"),
    *_groups("gpt", CORE, range(6, 10), "narrower interval of the slope"),
]
QUEUE = [group for group, _ in QUEUE_WITH_REASONS]
