"""Writes docs/benchmarks.md from the files in bench/results; `--check` only says whether the page is up to date.

    gradzip bench codec --rounds 25 --csv cpu_codec.csv
    gradzip bench codec --rounds 25 --isa avx2 --csv avx2.csv --codecs 'gcomp:mode=lossless;gcomp:keep=7;gcomp;zstd'
    gradzip bench codec --device cuda --input gradient.pt --csv gpu_codec.csv    # on a GPU
    sh bench/net.sh                                                              # net.csv
    gradzip emulate --hosts 4 --rate 1gbit -- python bench/steps.py --csv steps_cpu.csv --network '4 x 1 Gbit/s'
    gradzip emulate --hosts 4 --rate 1gbit -- python bench/steps.py --model small --torch bf16 --csv steps_cpu.csv
    G='gradzip emulate --gpu-share --hosts 4 --rate 10gbit --'                   # on a GPU
    $G gradzip bench net --device cuda --values 6553600,65536000 --input gradient.pt --csv net_gpu.csv
    torchrun --nproc-per-node 1 bench/steps.py --model gpt2 --steps 9 --network 'one rank' --csv steps_gpu.csv
    $G python bench/steps.py --model gpt2 --warm 5 --network '4 x 10 Gbit/s' --csv steps_gpu.csv
    $G python bench/exchange_gpu.py --model resnet18 --csv exchange_gpu.csv      # and resnet50, gpt2; --no-measure
    python bench/noise_kernels.py --csv noise_gpu.csv
    torchrun --nproc-per-node 1 bench/hook_cost.py --model gpt2 --csv hook_cost.csv
    python bench/make_tables.py

cpu_codec.csv is the first file with the native rows of the second behind it. steps_cpu.csv has the run at 1 Gbit/s and,
behind it, one at 100 Mbit/s, both with `--silence 40`; there torch's PowerSGD at rank 4, and at both rates `sign`,
`onebit`, `qsgd`, `terngrad` and `natural`, are from runs of their own, in which plain took 1312 and 10676 ms. For
gpu_codec.csv, gradient.pt are the values 4,194,304 to 5,242,879 of `gradzip.capture`'s model at step 300, with
parameters and moments; for net_gpu.csv the first 4,194,304 at step 120, whose parameters and second moments have 16
bits. hook_cost.csv's rows `--alone` with batches of 4 are of another day than the others. On the GPU, --codecs,
--policies and --rounds (30 for 26 MB) named what the tables show.
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
GB/s of raw input, CUDA events around whole calls: host launches and the wait for the size are inside, which is most of
the time of small messages. A million values of a 10 M-parameter GPT's gradient (AdamW, step 300), repeated to each
size. *Memory* is the share of the speed at which a device copy moves as many bytes as are read and written; *copy* is
that copy.
nvCOMP's rows are its Python codecs on the same floats, with the memory that they allocate.

| codec | MiB | chunks | ratio | encode | decode | copy | encode / memory | decode / memory |
|---|---|---|---|---|---|---|---|---|
"""


NET_HEAD = """
## Exchanges
One average of a gradient between four ranks; all of them on two cores, or all on one H200. `native` is torch's
all-reduce by Gloo, on the GPU by NCCL. *Ideal* is what native FP32 would take if time went with bytes: its time divided
by the ratio. *Sent* is what leaves a host. Codecs on the H200 were measured before the host runner carried them there.

| network | MB | codec | route | ms | sent, MB | ratio | speed-up | time / ideal |
|---|---|---|---|---|---|---|---|---|
"""

STEPS_HEAD = """
## Training steps
Median of a few steps with AdamW on random batches, of the slowest rank: a perceptron of 20 M parameters on two cores,
and GPT-2 of 124 M in BF16 autocast on one H200, by one rank (where gradzip codes nothing) and by four that share it.
What gradzip's rows of one rank differ by is noise. Gradients of random words compress better than those of text
(results.md). *torch* are torch's own hooks; their ratio is not counted. All replicas ended with the same bits. Rows of
four ranks on the H200, and of the perceptron, are older than the runners that carry them now. The rows of 1,000 small
tensors show what a tensor costs whatever its size: there the exchange is hardly the bottleneck.

| network | device | hook | ms | speed-up | ratio |
|---|---|---|---|---|---|
"""


STREAM_HEAD = """
## Training steps on a GPU
Four ranks that share an H200, 10 Gbit/s each (2 x 2: each two of them), BF16 autocast; each rank trains on one batch of
random data. *Over BF16* is the speed against torch's BF16 hook in the same run. *Bound* is the step over what a step
takes without exchange and the bytes at the goodput of torch's all-reduce: 1 if nothing of the exchange is hidden behind
backward, nor anything lost. Codecs of the four ranks share one GPU, too. *Host* is what all hooks of a step take on the
host. *Share* is that of the noise, whose budget is 1 %: it is larger where ranks' gradients cancel each other.
*Coarser* counts frames that did not fit their slots. All replicas ended with the same bits.

| model | hook | runner | ms | over BF16 | bound | host, ms | MB sent | bits | share | coarser |
|---|---|---|---|---|---|---|---|---|---|---|
"""

KERNELS_HEAD = """
## Kernels of noise on an H200
GB/s of raw input, by GPU events around all kernels of a call, with cold caches; *host* is what a call costs the host.
A message's `reduce` decodes and adds up the frames of all ranks for a fourth of the values, and encodes the sums.

| what | MiB | share | bits | call | us | GB/s | host, us |
|---|---|---|---|---|---|---|---|
"""

COST_HEAD = """
## What attach costs by itself
GPT-2 of 124 M on one H200, one rank, which codes and sends nothing: milliseconds of a step, medians of policies that
took turns; *hook* is what gradzip's hook takes of backward, on the host.

| policy | forward | backward | optimizer | added to the step | hook |
|---|---|---|---|---|---|
"""

ALONE_HEAD = """
The same where the rank codes as it would among others (`--alone`), so that only the wire is missing; older than the
runners that carry GPU models now:

| policy | texts x words | forward | backward | optimizer | added to the step | hook |
|---|---|---|---|---|---|---|
"""


def read(name: str) -> list[dict[str, str]]:
    with (HERE / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def net_table() -> str:
    lines = []
    for r in read("net.csv") + read("net_gpu.csv"):
        where = r["network"] + (", H200" if r["device"] == "cuda" else "")
        lines.append(
            f"| {where} | {float(r['megabytes']):.0f} | `{r['codec']}` | {r['route']} | {float(r['milliseconds']):.0f} "
            f"| {float(r['host_megabytes']):.1f} | {float(r['ratio']):.2f} | {float(r['speedup']):.2f} "
            f"| {float(r['of_ideal']):.2f} |"
        )
    return NET_HEAD + "\n".join(lines) + "\n"


def steps_table() -> str:
    rows, lines = read("steps_cpu.csv") + read("steps_gpu.csv"), []
    assert not any(int(r["replicas_differing"] or 0) for r in rows)
    plain = {(r["network"], r["device"]): float(r["median_ms"]) for r in rows if r["what"] == "plain"}
    for r in rows:
        of_torch = r["what"].startswith("torch")
        if not r["median_ms"]:
            lines.append(f"| {r['network']} | {r['device']} | {r['what']} | {r['outcome']} | | |")
            continue
        what, ratio = (r["what"], "") if of_torch else (f"`{r['what']}`", f"{float(r['ratio']):.1f}")
        speedup = plain[r["network"], r["device"]] / float(r["median_ms"])
        lines.append(
            f"| {r['network']} | {r['device']} | {what} | {float(r['median_ms']):.0f} | {speedup:.2f} | {ratio} |"
        )
    return STEPS_HEAD + "\n".join(lines) + "\n"


def stream_table() -> str:
    rows, lines = read("exchange_gpu.csv"), []
    assert not any(int(r["replicas_differing"] or 0) for r in rows)
    for r in rows:
        what = r["what"] if r["what"] == "torch bf16" else "no exchange" if r["what"] == "no_sync" else f"`{r['what']}`"
        gain = f"{1 / float(r['of_bf16_hook']):.2f}" if r["of_bf16_hook"] else ""
        sent = f"{float(r['mb_sent']):.0f} | {float(r['bits']):.1f}" if float(r["mb_sent"]) else "|"
        noise = f"{float(r['share']):.2%} | {r['coarser']}" if float(r["share"]) else "|"
        bound = f"{float(r['bound']):.2f}" if what != "no exchange" else ""
        where = "".join([", 2 x 2" if r["hosts"] == "2" else "", ", row-major" if r["layout"] == "row-major" else ""])
        lines.append(
            f"| {r['model']}{where} | {what} | {r['runner']} | {float(r['ms']):.1f} | {gain} | {bound} "
            f"| {r['host_ms']} | {sent} | {noise} |"
        )
    return STREAM_HEAD + "\n".join(lines) + "\n"


def kernels_table() -> str:
    lines = [
        f"| {r['of']}, {r['dtype']} | {r['MiB']} | {float(r['share']):g} | {r['bits']} | {r['what']} | {r['us']} "
        f"| {r['GB_per_s']} | {r['host_us']} |"
        for r in read("noise_gpu.csv")
        if not r["kernel"]
    ]
    return KERNELS_HEAD + "\n".join(lines) + "\n"


def gpu_table() -> str:
    rows = read("gpu_codec.csv")

    def share(text: str) -> str:
        return f"{float(text):.2f}" if float(text) else "–"

    lines = []
    for r in rows:
        if float(r["mib"]) in (1, 64):
            continue
        speeds = " | ".join(f"{float(r[name]):.0f}" for name in ("encode_gbps", "decode_gbps", "copy_gbps"))
        shares = f"{share(r['encode_floor'])} | {share(r['decode_floor'])}"
        size = f"{float(r['mib']):.0f} | {r['chunks']} | {float(r['ratio']):.2f}"
        lines.append(f"| {r['codec']} | {size} | {speeds} | {shares} |")
    return GPU_HEAD + "\n".join(lines) + "\n"


def cost_table() -> str:
    fields = ("forward_ms", "backward_ms", "optimizer_ms", "added_ms", "hook_ms")
    lines: dict[str, list[str]] = {"0": [], "1": []}  # by whether it codes
    for r in read("hook_cost.csv"):
        batch = f"{r['batch']} x {r['length']} | " if r["alone"] == "1" else ""
        times = " | ".join(f"{float(r[n]):.1f}" for n in fields)
        lines[r["alone"]].append(f"| `{r['policy']}` | {batch}{times} |")
    tables = COST_HEAD + "\n".join(lines["0"]) + "\n"
    return tables + ALONE_HEAD + "\n".join(lines["1"]) + "\n" if lines["1"] else tables


def page() -> str:
    rows = read("cpu_codec.csv")
    lines = [
        f"| `{r['codec']}` | {r['engine']} | {float(r['ratio']):.2f} | {float(r['bits']):.2f} "
        f"| {float(r['over']):.1f} % | {float(r['encode_memcpy']):.2f} | {float(r['decode_memcpy']):.2f} |"
        for r in rows
    ]
    speeds = [float(r["memcpy_gbps"]) for r in rows]
    note = f"\nThe copy ran at {min(speeds):.1f} to {max(speeds):.1f} GB/s ({rows[0]['processor']})."
    tables = [gpu_table(), kernels_table(), net_table(), steps_table(), stream_table(), cost_table()]
    return HEAD + "\n".join(lines) + "\n" + note + "\n" + "".join(tables)


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
