"""What limits, reaches and low bits cost: per cent over the entropy of codes made for one scale. Writes alphabets.csv.

python experiments/noise_coding/alphabets.py     # about a minute
"""

from __future__ import annotations

import csv
from pathlib import Path

import make_tables
import numpy as np

OUT = Path(__file__).parent / "alphabets.csv"
LIMITS = (10, 11, 12)


def main() -> None:
    rows = []
    for limit in LIMITS:
        for mean in 2.0 ** np.arange(-2, 3.01, 0.25):
            for low in range(3):
                for reach in range(2, 8):
                    weights = make_tables.pair_chances((low,), reach, [mean / 2**low], 1)
                    used = make_tables.symbols(reach)
                    lengths = np.zeros(256, np.int64)
                    lengths[used] = make_tables.code_lengths(np.maximum(weights[used], 1e-7), limit)
                    over = {
                        name: f"{100 * make_tables.overhead(lengths, name, mean / 2**low, low, reach):.2f}"
                        for name in make_tables.DISTRIBUTIONS
                    }
                    rows.append({"limit": limit, "mean": f"{mean:.3f}", "low": low, "reach": reach, **over})
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
