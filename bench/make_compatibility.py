"""Writes docs/compatibility.md from the tests that prove it.

The table of pairs has a cell for every case of tests/test_feature_pairs.py and for nothing else; the lines below it
name their tests, and tests/test_pages.py holds them to that.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
sys.path.insert(0, str(ROOT / "tests"))

LOOP = "test_loops.py::test_a_loop_goes_as_without_compression"
EXACT = "a lossless codec gives the same bits as plain DDP"
INTEGRATION = "test_integrations.py::test"

# (with, what holds, the tests that prove it)
LINES = (
    ("gradient accumulation without `no_sync`", EXACT, [f"{LOOP}[accumulation without no_sync]"]),
    (
        "a `GradScaler` that overflows on one rank",
        "all ranks skip the step, and it leaves no trace in the residuals",
        ["test_loops.py::test_all_ranks_skip_a_step_that_overflows_on_one"],
    ),
    ("learning-rate schedules", EXACT, [f"{LOOP}[schedule]"]),
    ("evaluation between steps", EXACT, [f"{LOOP}[evaluation]"]),
    ("your own `all_reduce` calls", EXACT, [f"{LOOP}[own all_reduce]"]),
    (
        "`find_unused_parameters`",
        "the same; the residual of an unused parameter waits until it is used",
        [f"{LOOP}[unused]", "test_loops.py::test_what_is_held_back_of_an_unused_branch_waits_for_it"],
    ),
    ("`static_graph`", EXACT, [f"{LOOP}[static graph]"]),
    ("`gradient_as_bucket_view`", EXACT, [f"{LOOP}[bucket views]"]),
    ("several parameter groups", EXACT, [f"{LOOP}[groups]"]),
    (
        "several optimizers",
        "each parameter's rules come from the optimizer that holds it; `auto` takes one optimizer",
        [
            "test_several_optimizers.py::test_rules_come_from_the_optimizer_that_holds_a_parameter",
            "test_several_optimizers.py::test_training_with_two_optimizers",
        ],
    ),
    ("frozen layers", "they do not change", ["test_loops.py::test_frozen_layers_stay_where_they_are"]),
    (
        "`Join`, near mode and policies that learn",
        "while a rank has no inputs, gradients are lossless, with a warning, and policies do not learn",
        ["test_loops.py::test_ranks_without_inputs_keep_the_others_company"],
    ),
    ("`torch.compile` inside and outside of DDP", EXACT, ["test_loops.py::test_compiled_models"]),
    ("several models in one process", "each with its own policy", ["test_loops.py::test_two_models_in_one_process"]),
    (
        "checkpoints of 4 ranks, by torch.distributed.checkpoint",
        "a resumed run is bit-identical",
        ["test_resume.py::test_four_ranks_stopped_at_a_random_step_go_on_identically"],
    ),
    (
        "another number of ranks, or a rank's file lost",
        "a rank without a state starts with empty residuals, and a log line says so",
        [
            "test_resume_ranks.py::test_a_third_rank_starts_with_empty_residuals",
            "test_resume_ranks.py::test_a_lost_file_costs_that_ranks_residuals_alone",
            "test_resume.py::test_another_number_of_ranks_goes_on_with_one_warning",
        ],
    ),
    (
        "channels_last and other layouts",
        "gradients keep their memory layout",
        ["test_attach.py::test_gradients_need_not_lie_in_row_major_order"],
    ),
    (
        "16-bit gradients",
        "summed in full precision",
        ["test_attach.py::test_sixteen_bit_gradients_are_summed_in_full"],
    ),
    (
        "TensorBoard, functions, torch.profiler",
        "they get gradzip's numbers and ranges",
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
        "Lightning, Accelerate, Trainer (`gradzip.integrations`)",
        "replicas agree, a resumed run is bit-identical, and a checkpoint of two ranks is resumed by three; "
        "tested where the package is installed",
        [
            f"{INTEGRATION}_a_resumed_run_is_bit_identical",
            f"{INTEGRATION}_a_checkpoint_of_two_ranks_is_resumed_by_three",
            "test_examples.py::test_frameworks",
        ],
    ),
    (
        "Lightning Fabric",
        "`attach` takes what `fabric.setup` returns",
        [f"{INTEGRATION}_fabric_needs_no_callback"],
    ),
    (
        "models on a GPU, Gloo between the ranks",
        f"{EXACT}, replicas are identical; AMP and SyncBatchNorm work, too (the test needs a GPU)",
        [
            "test_attach_gpu.py::test_lossless_is_plain_ddp",
            "test_attach_gpu.py::test_replicas_are_identical_and_near",
        ],
    ),
    (
        "FSDP, ZeRO, DDP's python reducer",
        "refused; the error says what works instead",
        ["test_attach_settings.py::test_what_cannot_work_is_refused"],
    ),
    (
        "composable `replicate()`",
        "refused; the error says what works instead",
        [f"{INTEGRATION}_composable_replicate_is_refused_with_what_works"],
    ),
)

HEAD = """# What it works with

`python bench/make_compatibility.py` writes this page from the tests. `attach` refuses what cannot work
([troubleshooting.md](troubleshooting.md)).

## In pairs, with DistributedDataParallel
`test_feature_pairs.py::test_pair` trains two ranks with each feature alone (on the diagonal) and with each pair of
features. A ✓ means: `gcomp:mode=lossless` ends with the same parameters as plain DDP, to the bit, and
`gcomp:ulps=4096` and `topk` leave all replicas identical. torch.compile is used with its
`eager` backend, which needs no compiler.

"""

BELOW = """
These tests run on CPUs over Gloo, in every run of the tests. `test_feature_pairs.py::test_pair_over_nccl` has the
same {count} cases over **NCCL**. They need a GPU, which ranks may share; all passed on an H200, before
codecs other than `noise` went by NCCL as well.

## One by one
Each line is tested on CPUs over Gloo with two or more ranks, unless it says otherwise.

| with | what holds | test |
|---|---|---|
"""


def page() -> str:
    from test_feature_pairs import CASES, FEATURES

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
