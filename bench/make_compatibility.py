"""Writes docs/compatibility.md from the tests that prove it.

The table of pairs has a cell for every case of tests/test_pairs.py and for nothing else; the lines below it name their
tests, and tests/test_pages.py holds them to that.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
sys.path.insert(0, str(ROOT / "tests"))

LOOP = "test_loops.py::test_a_loop_goes_as_without_compression"
EXACT = "lossless is plain DDP to the bit"

# (with, what holds, the tests that prove it)
LINES = (
    ("gradient accumulation without `no_sync`", EXACT, [f"{LOOP}[accumulation without no_sync]"]),
    (
        "a `GradScaler` that overflows on one rank",
        "all ranks skip the step, and nothing of it is kept",
        ["test_loops.py::test_all_ranks_skip_a_step_that_overflows_on_one"],
    ),
    ("learning-rate schedules", EXACT, [f"{LOOP}[schedule]"]),
    ("evaluation between steps", EXACT, [f"{LOOP}[evaluation]"]),
    ("`all_reduce` calls of one's own", EXACT, [f"{LOOP}[own all_reduce]"]),
    (
        "`find_unused_parameters`",
        "the same; what is held back waits for its branch",
        [f"{LOOP}[unused]", "test_loops.py::test_what_is_held_back_of_an_unused_branch_waits_for_it"],
    ),
    ("`static_graph`", EXACT, [f"{LOOP}[static graph]"]),
    ("`gradient_as_bucket_view`", EXACT, [f"{LOOP}[bucket views]"]),
    ("several parameter groups", EXACT, [f"{LOOP}[groups]"]),
    ("frozen layers", "they stay where they are", ["test_loops.py::test_frozen_layers_stay_where_they_are"]),
    (
        "`Join`, near mode and policies that learn",
        "lossless while ranks are missing, which is said; nothing is learnt then",
        ["test_loops.py::test_ranks_without_inputs_keep_the_others_company"],
    ),
    ("`torch.compile` inside and outside of DDP", EXACT, ["test_loops.py::test_compiled_models"]),
    ("several models in one process", "each with its own policy", ["test_loops.py::test_two_models_in_one_process"]),
    (
        "checkpoints of 4 ranks, by torch.distributed.checkpoint",
        "a run that was stopped goes on identically",
        ["test_resume.py::test_four_ranks_stopped_at_a_random_step_go_on_identically"],
    ),
    (
        "another number of ranks",
        "goes on, with a warning",
        ["test_resume.py::test_another_number_of_ranks_goes_on_with_one_warning"],
    ),
    (
        "channels_last and other layouts",
        "gradients keep their order",
        ["test_attach.py::test_gradients_need_not_lie_in_row_major_order"],
    ),
    (
        "16-bit gradients",
        "summed in full precision",
        ["test_attach.py::test_sixteen_bit_gradients_are_summed_in_full"],
    ),
    (
        "TensorBoard, functions, torch.profiler",
        "numbers and ranges arrive there",
        [
            "test_watching.py::test_rank_0_hands_numbers_to_every_writer",
            "test_watching.py::test_traces_show_exchanges_and_on_all_threads_codec_and_wire",
        ],
    ),
    (
        "torchrun, resuming, plans",
        "the examples run",
        [
            "test_examples.py::test_ddp",
            "test_examples.py::test_resuming_changes_no_bit",
            "test_examples.py::test_plan_then_train",
        ],
    ),
    (
        "Lightning, Accelerate, Trainer",
        "the examples run, where the package is installed",
        ["test_examples.py::test_frameworks"],
    ),
    (
        "models on a GPU, Gloo between the ranks",
        "lossless is plain DDP to the bit, replicas are identical; AMP and SyncBatchNorm too (needs a GPU to run)",
        [
            "test_attach_gpu.py::test_lossless_is_plain_ddp",
            "test_attach_gpu.py::test_replicas_are_identical_and_near",
        ],
    ),
    (
        "FSDP, ZeRO, DDP's python reducer",
        "refused, with what works instead",
        ["test_attach_settings.py::test_what_cannot_work_is_refused"],
    ),
)

HEAD = """# What it works with

Made by `python bench/make_compatibility.py` from the tests. `attach` itself refuses what cannot work
([troubleshooting.md](troubleshooting.md)).

## In pairs, with DistributedDataParallel
Two ranks train with each feature alone (on the diagonal) and with each pair, in `test_pairs.py::test_pair`. Where there
is a ✓, `gcomp:mode=lossless` ends with the parameters of plain DDP to the bit, and `gcomp:ulps=4096` and `topk` leave
all replicas identical. torch.compile is used with its `eager` backend, which needs no compiler.

"""

BELOW = """
That is on CPUs over Gloo, and in every run of the tests. Over **NCCL** the same {count} cases are
`test_pairs.py::test_pair_over_nccl`: they need a GPU, which ranks may share; all passed on an H200. gradzip's own
data travels over Gloo in both.

## And with
Each line is proved on CPUs over Gloo with two or more ranks, unless it says otherwise.

| with | what holds | proved by |
|---|---|---|
"""


def page() -> str:
    from test_pairs import CASES, FEATURES

    def cell(a: str, b: str) -> str:
        return "✓" if {a if a == b else f"{a} + {b}", f"{b} + {a}"} & set(CASES) else ""

    rows = [f"| | {' | '.join(FEATURES)} |", "|---" * (1 + len(FEATURES)) + "|"]
    rows += [f"| {a} | {' | '.join(cell(a, b) for b in FEATURES)} |" for a in FEATURES]
    lines = [f"| {what} | {holds} | {', '.join(f'`{test}`' for test in tests)} |" for what, holds, tests in LINES]
    return HEAD + "\n".join(rows) + "\n" + BELOW.format(count=len(CASES)) + "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
