"""How far frames of the codec noise are above the entropy of their integers; writes sizes.csv and README.md's table.

    python experiments/noise_coding/measure.py     # a minute or two; needs the native engine (make setup)

Four ranks. `own` is what a rank sends of its own gradient, `sum` what the owner of a part sends of the sum. Sizes are
whole frames with header, levels and index. The entropy is that of the integers, order 0: over all of a source
(synthetic ones, which have one distribution) or over each tensor, and over each block of 8192 values, which is lower
where the scale changes inside a tensor.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import SGD

from gradzip import capture, wire
from gradzip.engines import native_noise, noise_layout, reference_noise
from gradzip.engines.noise_layout import Part, Slot
from gradzip.sensitivity.shape import shape_of

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent.parent / "bench"))
import moments  # noqa: E402
import pictures  # noqa: E402

SHARES = (0.001, 0.01, 0.03, 0.1, 0.3)
WORLD = 4
VALUES = 1 << 21
WINDOW = noise_layout.BLOCK


@dataclass
class Row:
    """Bits per value; `over` in per cent."""

    source: str
    hop: str
    share: float
    values: int
    bits: float
    entropy: float  # of all values, or of each tensor
    over: float
    block_entropy: float  # of each block
    over_block: float


@dataclass
class Source:
    name: str
    ranks: list[list[torch.Tensor]]  # of each rank the tensors
    shapes: list[torch.Tensor | None]  # of each tensor


# --- Gradients --------------------------------------------------------------------------------------------------------


def synthetic() -> Iterator[Source]:
    rng = np.random.default_rng(0)
    makers = {
        "gauss": lambda: rng.standard_normal(VALUES),
        "laplace": lambda: rng.laplace(size=VALUES),
        "t4": lambda: rng.standard_t(4, VALUES),
        "log-normal rows": lambda: (
            rng.standard_normal((VALUES // 512, 512)) * np.exp(rng.standard_normal((VALUES // 512, 1)))
        ),
    }
    for name, make in makers.items():
        ranks = [[torch.from_numpy(make().astype(np.float32).reshape(-1))] for _ in range(WORLD)]
        yield Source(name, ranks, [None])


def language_model() -> Iterator[Source]:
    """The gradient that `gradzip bench codec` measures on, with AdamW's second moment as shape and without."""
    snapshot = capture.cached()
    sizes = [p.numel() for p in capture.ByteModel(capture.BENCH).parameters()]
    tensors = list(torch.split(snapshot.gradient, sizes))
    yield Source("transformer", [tensors], [None] * len(sizes))
    shapes = [shape_of(v) for v in torch.split(snapshot.second, sizes)]
    yield Source("transformer, shape", [tensors], list(shapes))


def convolutions() -> Iterator[Source]:
    torch.manual_seed(0)
    model = pictures.network()
    for step, _ in enumerate(
        moments.train(SGD(model.parameters(), lr=0.01, momentum=0.9), partial(pictures.loss, model), 100), 1
    ):
        if step == 100:
            yield Source("convolutions", [[p.grad.reshape(-1).clone() for p in model.parameters()]], [None] * 99)


# --- Sizes ------------------------------------------------------------------------------------------------------------


def measured(source: Source, share: float) -> Iterator[Row]:
    ranks = []
    for rank, tensors in enumerate(source.ranks):
        parts = []
        for number, (x, shape) in enumerate(zip(tensors, source.shapes)):
            level = noise_layout.level(native_noise.statistics(x, shape), share, WORLD)
            key = noise_layout.key_of(0, 0, str(number), "own", 0)
            parts.append(Part(x, level, shape, 0, key, noise_layout.offset_of(rank, WORLD)))
        ranks.append(parts)
    yield row(source, "own", share, ranks[0])
    if len(ranks) < WORLD:
        return
    sums = []
    for number, shape in enumerate(source.shapes):
        total = torch.stack([tensors[number] for tensors in source.ranks]).sum(0)
        level = noise_layout.level_of_sum([parts[number].level for parts in ranks])
        sums.append(Part(total, level, shape, 0, noise_layout.key_of(0, 0, str(number), "sum", 0)))
    yield row(source, "sum", share, sums)


def row(source: Source, hop: str, share: float, parts: list[Part]) -> Row:
    counts = [part.values.numel() for part in parts]
    room = torch.zeros(wire.HEADER_BYTES + noise_layout.body_bound(counts), dtype=torch.uint8)
    (written,) = native_noise.encode_frames([Slot(parts, room)], 0, 0)
    integers = [reference_noise.rounded(part, 0) for part in parts]
    total = sum(counts)
    bits = 8 * written.size / total
    whole = sum(entropy(q) for q in integers) / total
    sequence = np.concatenate(integers)
    block = sum(entropy(sequence[start : start + WINDOW]) for start in range(0, sequence.size, WINDOW)) / total
    over = [100 * (bits / bound - 1) for bound in (whole, block)]
    return Row(source.name, hop, share, total, bits, whole, over[0], block, over[1])


def entropy(q: npt.NDArray[np.float32]) -> float:
    _, count = np.unique(q, return_counts=True)
    return float((count * np.log2(q.size / count)).sum())


def table(rows: list[Row]) -> str:
    """README.md's table: bits, and per cent over both entropies."""
    lines = ["| source | hop |" + "".join(f" {100 * share:g} % |" for share in SHARES)]
    lines.append("| --- | --- |" + " --- |" * len(SHARES))
    for source, hop in dict.fromkeys((r.source, r.hop) for r in rows):
        cells = [
            f" {r.bits:.2f}: {r.over:+.1f}, {r.over_block:+.1f} |" for r in rows if (r.source, r.hop) == (source, hop)
        ]
        lines.append(f"| {source} | {hop} |" + "".join(cells))
    return "\n".join(lines) + "\n"


def filled(readme: str, rows: list[Row]) -> str:
    before, mark, rest = readme.partition("<!-- sizes -->\n")
    return before + mark + table(rows) + "<!-- /sizes -->" + rest.partition("<!-- /sizes -->")[2]


def read() -> list[Row]:
    with (HERE / "sizes.csv").open(newline="") as file:
        return [
            Row(r["source"], r["hop"], *(float(r[f.name]) for f in fields(Row)[2:]))  # type: ignore[arg-type]
            for r in csv.DictReader(file)
        ]


def main() -> None:
    rows = []
    for make in (synthetic, language_model, convolutions):
        for source in make():
            for share in SHARES:
                for one in measured(source, share):
                    rows.append(one)
                    print(f"{one.source}, {one.hop}, {one.share}: {one.bits:.3f} bits, +{one.over:.2f} %", flush=True)
    with (HERE / "sizes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)
    (HERE / "README.md").write_text(filled((HERE / "README.md").read_text(), read()))


if __name__ == "__main__":
    main()
