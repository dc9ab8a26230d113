"""`gradzip doctor`: what is there, what is not, and why."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from .. import __version__, codecs, engines
from ..bench import cluster
from ..codecs import Context
from ..emulate import format_rate
from ..engines.cuda import pack_select
from ..errors import EngineError, GradzipError
from ..exchange.message_codecs import stream_codec
from ..exchange.on_stream import factors
from ..exchange.on_stream import runner as on_stream
from ..hooks import default
from .table import Column, Commands, Row, add_json, command, show

_ORDER = ("broken", "ok", "absent")
_MARKS = {"ok": "ok", "absent": "–", "broken": "BROKEN"}

_COLUMNS = (
    Column("what", "what"),
    Column("status", "status", _MARKS.__getitem__),
    Column("found", "found", wrap=True),
)
_RANKS = (
    Column("rank", "rank", right=True),
    Column("host", "host"),
    Column("interface", "interface"),
    Column("address", "address"),
    Column("gradzip", "gradzip"),
    Column("torch", "torch"),
    Column("engine", "engines"),
    Column("environment", "GRADZIP*", wrap=True),
    Column("slowest_bps", "slowest\nlink", lambda rate: "–" if rate is None else format_rate(rate), right=True),
    Column("peer", ""),
)


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "doctor",
        "check this installation",
        "gradzip doctor --json",
        "Says which engines run here, which do not and why. The exit code is 1 if anything is broken. Started by a "
        "launcher (torchrun --nnodes 4 … -m gradzip doctor) it compares all ranks and tries the network between them.",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rows = sorted(checks(), key=lambda row: _ORDER.index(row["status"]))  # what to mend comes first
    if cluster.launched():
        return _cluster(rows, args.json)
    show("gradzip doctor", _COLUMNS, rows, as_json=args.json)
    return int(any(row["status"] == "broken" for row in rows))


def _cluster(rows: list[Row], as_json: bool) -> int:
    """One table for all ranks, printed by rank 0."""
    broken = [f"{row['what']}: {row['found']}" for row in rows if row["status"] == "broken"]
    running = [row["what"].removeprefix("engine ") for row in rows if row["what"].startswith("engine ")]
    running = [name for name in running if not any(text.startswith(f"engine {name}") for text in broken)]
    absent = {row["what"].removeprefix("engine ") for row in rows if row["status"] == "absent"}
    engine = "+".join(name for name in running if name not in absent)
    found = cluster.examine(cluster.own_facts({"gradzip": __version__, "torch": torch.__version__}, engine, broken))
    if os.environ["RANK"] == "0":
        notes = [f"PROBLEM: {text}" for text in found.problems] or ["all ranks are alike and reach each other"]
        ranks = [{**own, "slowest_bps": own.get("slowest_bps"), "peer": _peer(own)} for own in found.ranks]
        show(f"gradzip doctor on {len(ranks)} ranks", _RANKS, ranks, notes, as_json=as_json, section="host_number")
    return int(bool(found.problems))


def _peer(own: Row) -> str:
    return f"to rank {own['slowest_peer']}" if "slowest_peer" in own else "–"


def checks() -> Iterator[Row]:
    """One row per check; `broken` is what a user has to mend, `absent` is what is merely not there."""
    yield _found("gradzip", __version__)
    for name in sorted(engines.NAMES, key=("native", "cuda", "reference").index):
        yield _engine(name)
    yield _gpu()
    yield _packing()
    yield _default()
    yield _stream_runner()
    yield _host_runner()
    yield _override()
    yield _threads()
    yield _found("torch", torch.__version__)
    yield _found("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _found("numpy", np.__version__)
    yield _library("zstandard", "baselines", "for comparison")
    yield _library("lz4", "baselines", "for comparison")


def _found(what: str, found: str, status: str = "ok") -> Row:
    return {"what": what, "status": status, "found": found}


def _threads() -> Row:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _found("threads", f"{torch.get_num_threads()} torch threads on {usable} usable cores")


def _gpu() -> Row:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return _found("gpu", ", ".join(names))
    reason = "torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
    return _found("gpu", reason, "absent")


def _packing() -> Row:
    """How codecs other than gcomp pack bits, select values and multiply matrices on a GPU."""
    if not torch.cuda.is_available():
        return _found("other kernels", "not used: torch's operations pack, select and multiply on a CPU", "absent")
    reason = pack_select.reason_against()
    if reason:
        return _found("other kernels", f"torch's operations instead, which are slower: {reason}", "absent")
    return _found("other kernels", "in use on the GPU to pack, to select, and for PowerSGD")


def _engine(name: str) -> Row:
    what = f"engine {name}"
    if name == "cuda" and not torch.cuda.is_available():
        return _found(what, "not used: it codes CUDA tensors, and there is no CUDA device", "absent")
    try:
        engine = engines.load(name)
        _self_test(name)
    except GradzipError as reason:
        return _found(what, str(reason), "broken")
    if name == "native":
        others = ", ".join(engine.available_isas())
        return _found(what, f"{engine.isa()} (this processor offers {others}), self-test passed")
    return _found(what, "self-test passed")


def _self_test(name: str) -> None:
    """The engine's bytes must be the reference engine's, and must decode to what went in."""
    x = torch.linspace(-1e-3, 1e-3, 10_000)
    device = "cuda" if name == "cuda" else "cpu"
    codec = codecs.parse("gcomp:mode=lossless")
    with engines.use("reference"):
        expected = codec.encode(x, Context())
    with engines.use(name):
        payload = codec.encode(x.to(device), Context())
        back = codec.decode(payload, Context())
    if not torch.equal(payload.cpu(), expected) or not torch.equal(back.cpu(), x):
        raise EngineError(f"the {name} engine fails its self-test: install gradzip again and report it if that fails")


def _override() -> Row:
    name = os.environ.get("GRADZIP_ENGINE")
    if name is None:
        return _found("GRADZIP_ENGINE", "not set: the engine follows the tensor's device", "absent")
    known = name in engines.NAMES
    found = f"forces the {name} engine" if known else f"{name!r} is no engine: choose one of {', '.join(engines.NAMES)}"
    return _found("GRADZIP_ENGINE", found, "ok" if known else "broken")


def _default() -> Row:
    """What attach takes where no codec is named."""
    reason = _reason_against_streams() if torch.cuda.is_available() else None
    if reason is None:
        return _found("default codec", default.in_words())
    return _found("default codec", f"on GPUs {default.in_words(streams=False)}, as noise cannot be sent: {reason}")


def _reason_against_streams() -> str | None:
    if not dist.is_nccl_available():
        return "this torch is built without NCCL, which carries it"
    return on_stream.reason_against_torch()


def _stream_runner() -> Row:
    """Whether gradients of GPU models can stay on the GPU, and by which codecs."""
    what = "stream runner"
    if not torch.cuda.is_available():
        return _found(what, "not used: it carries gradients of models on GPUs", "absent")
    if (reason := _reason_against_streams()) is not None:
        return _found(what, f"not used: {reason}", "absent")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return _found(what, f"carries {_by_streams()} from GPU to GPU, by the process group's NCCL {version}")


def _by_streams() -> str:
    """Codecs whose frames have a size that is known beforehand."""
    usual = [codecs.parse(name) for name in sorted(codecs.REGISTRY)]
    *names, last = [c.name for c in usual if stream_codec(c) is not None or (c.rounds > 1 and factors.serves(c))]
    return f"{', '.join(names)} and {last}"


def _host_runner() -> Row:
    """Whether gradients can go by way of the host's memory, as those of every codec may."""
    what = "host runner"
    if not dist.is_gloo_available():
        return _found(what, "this torch is built without Gloo, which carries it: install one that has it", "broken")
    if torch.cuda.is_available():
        return _found(what, "carries models on CPUs, and what streams do not, over Gloo by way of pinned memory")
    return _found(what, "carries all codecs over Gloo, from the memory of the CPU")


def _library(name: str, extra: str, purpose: str) -> Row:
    try:
        version = getattr(importlib.import_module(name), "__version__", "there")
    except ImportError:
        return _found(name, f"not installed ({purpose}: pip install 'gradzip[{extra}]')", "absent")
    return _found(name, f"{version}, {purpose}")
