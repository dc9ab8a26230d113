"""What gradzip does shows in traces of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_ranks
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from training import start

from gradzip.spans import span


def traced_backward(rank: int, folder: str) -> None:
    """Two steps before any profiler, so that all threads are there already; then one under each kind of it."""
    run = start("gcomp:keep=7")
    run.train(0, 2)
    for name, config in (("usual", None), ("all", _ExperimentalConfig(profile_all_threads=True))):
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            run.train(2, 3)
        if rank == 0:
            profiler.export_chrome_trace(f"{folder}/{name}.json")
    run.train(3, 4)  # as if there had been none


def test_traces_show_exchanges_and_on_all_threads_codec_and_wire(tmp_path: Path) -> None:
    run_ranks(2, traced_backward, str(tmp_path))
    found = {}
    for kind in ("usual", "all"):
        events = json.loads((tmp_path / f"{kind}.json").read_text())["traceEvents"]
        ours = [event for event in events if event["name"].startswith("gradzip: ")]
        found[kind] = {event["name"].split()[1] for event in ours}
        exchanges = [event for event in ours if event["name"].startswith("gradzip: exchange of '")]
        assert len(exchanges) > 1, "one for each bucket"
        assert len({event["tid"] for event in exchanges}) == 1
        assert all(event["dur"] > 0 for event in exchanges)
        if kind == "all":
            threads = {event["tid"] for event in ours} - {exchanges[0]["tid"]}
            assert len(threads) > 1, "stages have threads of their own"
            coded = [event["name"] for event in ours if event["name"].startswith("gradzip: code ")]
            assert any("gcomp:keep=7" in name and "by alltoall at step 3 for '" in name for name in coded), coded
    assert found["usual"] == {"exchange"}
    assert found["all"] == {"exchange", "code", "wire", "encode", "decode"}


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert span("encode") is span("wire", "of all")
