"""Writes docs/benchmarks.md from the files in bench/results; `--check` only says whether the page is up to date.

    gradzip bench codec --rounds 25 --csv cpu_codec.csv
    gradzip bench codec --rounds 15 --isa avx2 --csv avx2.csv --codecs 'gcomp:mode=lossless;gcomp:keep=7;gcomp;zstd'
    python bench/gpu_codec.py gpu_codec.csv --folder FOLDER --mib 4 16 64 256 1024    # on a GPU
    python bench/make_tables.py

cpu_codec.csv is the first file with the native rows of the second behind it; in gpu_codec.csv the folder's name was
replaced by `gpt`. The rows of mode=paper and of gcomp on AVX2 are older than a change that made those encoders faster.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Made by `python bench/make_tables.py` from `bench/results`; its first lines say which commands wrote those files.
Speeds are multiples of a copy of the same gradient between two recycled buffers, timed in the same rounds: machines
are noisy, ratios less so.

## Codecs on the CPU, one core
Gradient of the byte-level language model of `gradzip bench codec` (10 M parameters, AdamW, step 120). *Over* is how far
the size lies above the order-0 entropy of the exponents per 16K values plus sign and kept mantissa bits. Near mode
computes its floors from parameters and second moments inside the time shown.

| codec | engine | ratio | bits per value | over | encode / copy | decode / copy |
|---|---|---|---|---|---|---|
"""


GPU_HEAD = """
## GComp on an H200
GB/s of raw input, CUDA events, host launches included; the gradient of a 10 M-parameter GPT, repeated to each size. The
last column is a device copy of the same bytes.

| mode | MiB | ratio | encode | decode | copy |
|---|---|---|---|---|---|
"""


def gpu_table() -> str:
    with (HERE / "results" / "gpu_codec.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        f"| {r['mode']} | {r['MiB']} | {r['ratio']} | {r['encode GB/s']} | {r['decode GB/s']} | {r['copy GB/s']} |"
        for r in rows
        if r["MiB"] in ("4", "16", "256", "1024")
    ]
    return GPU_HEAD + "\n".join(lines) + "\n"


def page() -> str:
    with (HERE / "results" / "cpu_codec.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        f"| `{r['codec']}` | {r['engine']} | {float(r['ratio']):.2f} | {float(r['bits']):.2f} "
        f"| {float(r['over']):.1f} % | {float(r['encode_memcpy']):.2f} | {float(r['decode_memcpy']):.2f} |"
        for r in rows
    ]
    speeds = [float(r["memcpy_gbps"]) for r in rows]
    note = f"\nThe copy ran at {min(speeds):.1f} to {max(speeds):.1f} GB/s ({rows[0]['processor']})."
    return HEAD + "\n".join(lines) + "\n" + note + "\n" + gpu_table()


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
