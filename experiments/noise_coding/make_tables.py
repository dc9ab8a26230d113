"""Makes the code tables of docs/format.md, "Noise: frames of many parts", and writes them wherever they are listed.

    python experiments/noise_coding/make_tables.py

The tables are frozen: the listing in docs/format.md is the law, and this script says where it came from. A table holds
the code lengths of the 256 pairs of digits. It is the best code of at most 12 bits for a mixture of three distributions
(Gaussian, Laplace, Student's t with 4 degrees of freedom), each rounded without bias and scaled so that the mean
magnitude of the integers is at the lower end, the middle and the upper end of the class.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ROOT = Path(__file__).parents[2]
LIMIT = 12  # bits of the longest code: four codes fit a 64-bit load at any bit
TOP = 1.85  # mean magnitude above which a low bit is split off
BELOW = 16  # classes without low bits, 2^(1/4) apart
OCTAVE = 4  # classes for each number of low bits
MOST_LOW_BITS = 8
ESCAPE = 15
SPAN = 1 << 12


def above_gauss(x: Array, mean: float) -> Array:
    """E[max(x - X, 0)] of a normal variable with that mean magnitude; so for the two below."""
    sd = mean * math.sqrt(math.pi / 2)
    z = x / sd
    cdf = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z])
    return sd * (z * cdf + np.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def above_laplace(x: Array, mean: float) -> Array:
    return np.maximum(x, 0) + mean / 2 * np.exp(-np.abs(x) / mean)


def above_t4(x: Array, mean: float) -> Array:
    z = x / mean
    u = 1 + z * z / 4
    cdf = 0.5 + 3 / 8 * (z / np.sqrt(u)) * (1 - z * z / u / 12)
    return mean * (z * cdf + 3 / 8 * u**-2.5 * (4 + z * z) / 3)


DISTRIBUTIONS = {"gauss": above_gauss, "laplace": above_laplace, "t4": above_t4}


def chances(name: str, mean: float) -> Array:
    """The chance of each integer from -SPAN to SPAN after unbiased rounding: a second difference."""
    f = DISTRIBUTIONS[name](np.arange(-SPAN - 1, SPAN + 2, dtype=np.float64), mean)
    p = np.maximum(f[2:] - 2 * f[1:-1] + f[:-2], 0)
    return p / p.sum()


def entropy(p: Array) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def digits(p: Array, low: int, reach: int) -> Array:
    """The chances of the 16 digits: h + reach for |h| <= reach, and the escape."""
    q = np.arange(-SPAN, SPAN + 1)
    h = (q + (1 << low >> 1)) >> low
    inside = np.abs(h) <= reach
    out = np.zeros(16)
    np.add.at(out, h[inside] + reach, p[inside])
    out[ESCAPE] = p[~inside].sum()
    return out


def symbols(reach: int) -> list[int]:
    """Pairs that have a code: first digit + 16 * second digit."""
    valid = [*range(2 * reach + 1), ESCAPE]
    return [a + 16 * b for b in valid for a in valid]


def code_lengths(weights: Array, limit: int) -> npt.NDArray[np.int64]:
    """Package-merge."""
    items = sorted((float(w), (i,)) for i, w in enumerate(weights))
    row: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(limit):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(row[::2], row[1::2])]
        row = sorted([*items, *pairs], key=lambda entry: entry[0])
    out = np.zeros(len(weights), np.int64)
    for _, members in row[: 2 * len(weights) - 2]:
        for i in members:
            out[i] += 1
    return out


def pair_chances(lows: tuple[int, ...], reach: int, means: list[float], gauss: int) -> Array:
    total = np.zeros((16, 16))
    for low in lows:
        for name in DISTRIBUTIONS:
            for mean in means:
                d = digits(chances(name, mean * 2.0**low), low, reach)
                total += (gauss if name == "gauss" else 1) * np.outer(d, d)
    return total.reshape(-1) / total.sum()


def overhead(lengths: npt.NDArray[np.int64], name: str, mean: float, low: int, reach: int) -> float:
    """Of the codes, escapes and low bits over the entropy."""
    p = chances(name, mean * 2.0**low)
    d = digits(p, low, reach)
    bits = float((np.outer(d, d).reshape(-1) * lengths).sum()) / 2 + 8 * d[ESCAPE] + low
    return bits / entropy(p) - 1


def table(lows: tuple[int, ...], lower: float, upper: float) -> tuple[npt.NDArray[np.int64], int, dict[str, float]]:
    """Code lengths, reach and overheads of the table whose worst overhead is the least.

    It is tried with every reach, and with the Gaussian counting once or twice.
    """
    means, options = [lower, math.sqrt(lower * upper), upper], []
    for reach in range(1, 8):
        for gauss in (1, 2):
            weights, used = pair_chances(lows, reach, means, gauss), symbols(reach)
            lengths = np.zeros(256, np.int64)
            lengths[used] = code_lengths(np.maximum(weights[used], 1e-7), LIMIT)
            over = {
                name: float(np.mean([overhead(lengths, name, mean, low, reach) for mean in means for low in lows]))
                for name in DISTRIBUTIONS
            }
            options.append((lengths, reach, over))
    return min(options, key=lambda option: max(option[2].values()))


def edges() -> list[float]:
    """The lower edge of every class but the first."""
    return [TOP * 2 ** ((j - BELOW) / 4) for j in range(1, BELOW + OCTAVE * MOST_LOW_BITS)]


def main() -> None:
    tables, reaches = [], []
    for j in range(BELOW + OCTAVE):
        lows, top = ((0,), TOP) if j < BELOW else ((1, 2, 3), TOP / 2)
        lower, upper = (top * 2 ** ((i - BELOW) / 4) for i in (j, j + 1))
        lengths, reach, over = table(lows, lower, upper)
        tables.append(lengths)
        reaches.append(reach)
        texts = ", ".join(f"{name} {100 * value:.2f}" for name, value in over.items())
        print(f"table {j}: mean {lower:.3f} to {upper:.3f}, reach {reach}, over the entropy by {texts} %", flush=True)
    thresholds = [round(256 * edge) for edge in edges()]
    packed = ["".join(f"{lengths[i] | lengths[i + 1] << 4:02x}" for i in range(0, 256, 2)) for lengths in tables]
    write_python(thresholds, reaches, packed)
    write_header(thresholds, reaches, packed)
    write_page(thresholds, reaches, packed)


def write_page(thresholds: list[int], reaches: list[int], packed: list[str]) -> None:
    page = ROOT / "docs/format.md"
    before, mark, rest = page.read_text().partition(
        "<!-- noise tables: made by experiments/noise_coding/make_tables.py -->\n"
    )
    end = "<!-- /noise tables -->"
    listing = "".join(
        f"{number:2} {reach} {text[:128]}\n     {text[128:]}\n"
        for number, (reach, text) in enumerate(zip(reaches, packed))
    )
    body = (
        "The thresholds, one for each class but the first:\n"
        f"```\n{wrapped(thresholds, '')}```\n"
        "Each table's number, reach and the code lengths of its 256 pairs, 4 bits each, the even pair in the low "
        "half of a byte; 0: the pair cannot occur.\n"
        f"```\n{listing}```\n"
    )
    assert mark, "docs/format.md has no place for the tables"
    page.write_text(before + mark + body + end + rest.partition(end)[2])


def wrapped(numbers: list[int], indent: str) -> str:
    rows = [", ".join(map(str, numbers[i : i + 16])) for i in range(0, len(numbers), 16)]
    return "".join(f"{indent}{row},\n" for row in rows)


def write_python(thresholds: list[int], reaches: list[int], packed: list[str]) -> None:
    lines = "".join(f'    "{text[:112]}"\n    "{text[112:224]}"\n    "{text[224:]}",\n' for text in packed)
    (ROOT / "src/gradzip/engines/noise_tables.py").write_text(
        '"""The frozen code tables of docs/format.md, "Noise: tables"; made by experiments/noise_coding."""\n\n'
        "# fmt: off\n"
        "THRESHOLDS = (  # of 256 times the mean magnitude, the least of each class but the first\n"
        f"{wrapped(thresholds, '    ')})\n"
        f"REACHES = (  # largest |h| that has a digit\n{wrapped(reaches, '    ')})\n"
        f"LENGTHS = (  # code lengths of the 256 pairs, two to a byte, the even one in the low half\n{lines})\n"
    )


def write_header(thresholds: list[int], reaches: list[int], packed: list[str]) -> None:
    rows = "".join("    {" + ",".join(f"0x{text[i : i + 2]}" for i in range(0, 256, 2)) + "},\n" for text in packed)
    (ROOT / "native/noise_tables.h").write_text(
        '// The frozen code tables of docs/format.md, "Noise: tables"; made by experiments/noise_coding.\n'
        "#ifndef GRADZIP_NOISE_TABLES_H\n#define GRADZIP_NOISE_TABLES_H\n\n#include <cstdint>\n\n"
        "namespace gz {\nnamespace noise {\n\n"
        f"constexpr int kTables = {len(packed)}, kClasses = {len(thresholds) + 1};\n"
        "// Of 256 times the mean magnitude, the least of each class but the first.\n"
        f"constexpr uint32_t kThresholds[kClasses - 1] = {{\n{wrapped(thresholds, '    ')}}};\n"
        "// Largest |h| that has a digit.\n"
        f"constexpr uint8_t kReaches[kTables] = {{\n{wrapped(reaches, '    ')}}};\n"
        "// Code lengths of the 256 pairs, two to a byte, the even one in the low half.\n"
        f"constexpr uint8_t kLengths[kTables][128] = {{\n{rows}}};\n\n"
        "}  // namespace noise\n}  // namespace gz\n#endif\n"
    )


if __name__ == "__main__":
    main()
