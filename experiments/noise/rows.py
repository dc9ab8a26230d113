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
# Near mode moves no parameter by more than an ulp in a step: such a pair drifts apart as nudged ones do, or is wrong.
GCOMP = (Variant("near", "near"), Variant("paper", "paper"))
FURTHER = (
    Variant("gauss 30 %", "gauss", 0.3),
    Variant("batch / 1.33", batch=12 / 16),
    Variant("steps / 1.3", length=1 / 1.3),
    Variant("rate - 20 %", rate=0.8),
)


# A verdict on one more setting for the price of eight runs: the slope rests on the largest budget, and its interval on
# the number of seeds.
SLOPE = (*((seed, v) for seed in range(3) for v in (PLAIN, noise(30))), (0, noise(1)), (0, noise(10)))
# Fine-tuning begins at the same weights with every seed: pairs stay close, and few runs say much.
TUNED = (
    *((0, v) for v in (PLAIN, noise(30), NUDGED, noise(10), noise(1))),
    *((seed, v) for seed in (1, 2, 3) for v in (PLAIN, noise(30))),
    *((seed, v) for seed in (1, 2) for v in (noise(10), noise(1))),
    (0, INT4),
)
FINER = (
    *((seed, v) for seed in (0, 1) for v in (noise(0.1), noise(0.3), noise(3))),
    *((seed, v) for seed in (2, 3) for v in (PLAIN, noise(0.3), noise(1), noise(3), noise(10))),
)


def _group(task: str, variants: tuple[Variant, ...], seeds: Iterable[int], why: str) -> tuple[Group, str]:
    return Group(task, tuple((seed, variant) for seed in seeds for variant in variants)), why


QUEUE_WITH_REASONS: list[tuple[Group, str]] = [
    _group("gpt", CORE, (0, 1), "the slope under AdamW"),
    _group("gpt-muon", MUON, (0, 1), "which shape suits Muon"),
    _group("gpt", CORE, (2, 3), "narrower interval of the slope"),
    (Group("gpt-muon", FINER), "finer budgets, and two more seeds"),
    _group("cifar20k", FEW, range(3, 8), "SGD, where pairs diverge by themselves: seeds count"),
    (Group("gpt-beta2", SLOPE), "second moments that lag"),
    (Group("gpt-16", SLOPE), "16 workers"),
    _group("gpt", CONTROLS, (0,), "other codecs and controls on the same seed"),
    _group("gpt", (PLAIN, noise(30)), range(4, 8), "narrower interval of the slope"),
    (Group("gpt-batch8", SLOPE), "more signal than sampling noise"),
    (Group("gpt-11m", SLOPE), "a larger model"),
    (Group("sst2", TUNED), "fine-tuning of a pretrained BERT"),
    _group("gpt2", (PLAIN, noise(30), noise(1), NUDGED), (0,), "one pair at 124 M parameters"),
    _group("gpt", GCOMP, (0, 1), "near and paper mode under AdamW"),
    _group("gpt-11m", GCOMP, (0,), "near and paper mode on a larger model"),
    _group("cifar20k", GCOMP, (0, 1), "near and paper mode under SGD"),
    _group("gpt2", (PLAIN, noise(30), noise(1), NUDGED), (1, 2), "pairs at 124 M parameters, each trained at once"),
    _group("cifar50k", (PLAIN, noise(30), noise(10), noise(1), NUDGED), range(4), "SGD on all of CIFAR-10"),
    _group("gpt", FURTHER, (0, 1), "further controls"),
    _group("gpt", CONTROLS, (1,), "a second seed of the controls"),
    _group("gpt-muon", (PLAIN, noise(10)), range(4, 8), "more seeds"),
    _group("cifar20k", FEW, range(8, 16), "narrower interval"),
]
QUEUE = [group for group, _ in QUEUE_WITH_REASONS]
