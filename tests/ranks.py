"""Runs a function in several processes that form a group over loopback."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradzip import engines
from gradzip.errors import EngineError
from gradzip.exchange.peers.gloo import with_one_thread

TIMEOUT = timedelta(seconds=30)  # of every collective, so that a hang becomes an error
DEADLINE = 200.0  # seconds for a whole run

# New processes are copies of one that has imported what takes seconds, and has done nothing else.
fork_server = mp.get_context("forkserver")
fork_server.set_forkserver_preload(["gradzip", "pytest", "torch._dynamo"])


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE, backend: str = "gloo"
) -> list[Any]:
    """function(rank, *args) in each of `world` new processes; what each returned, in the order of ranks.

    An exception in one of them is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = (world, folder, backend, dict(os.environ), function, args)
        running = mp.start_processes(_enter, job, world, join=False, start_method="forkserver")
        end = time.monotonic() + deadline
        try:
            while not running.join(timeout=1):
                assert time.monotonic() < end, f"the ranks still run after {deadline:.0f} s"
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(
    rank: int,
    world: int,
    folder: str,
    backend: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()  # a rank that crashes says where its threads were
    os.environ |= environment  # that of the test: this process is a copy of an older one
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["GRADZIP_ENGINE"] = engine_of_ranks()
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    if backend == "nccl":
        # ranks may share a GPU: NCCL refuses that only among ranks which it takes for those of one host
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(rank % torch.cuda.device_count())
        del os.environ["GRADZIP_ENGINE"]  # the right one for each device
    if backend == "gloo of one thread":  # with torch's usual two, sparse sums may end the process: see with_one_thread
        dist.Backend.register_backend(backend, with_one_thread, devices=["cpu"])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)
    torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    leave()


@functools.cache
def engine_of_ranks() -> str:
    """The fast one for CPUs, where it is built. All engines make the same bytes; the reference is always there."""
    try:
        engines.load("native")
    except EngineError:
        return "reference"
    return "native"


def leave() -> None:
    """Ends this process as any Python ends: one of a fork server's would be cut off, and what runs at exit with it."""
    gc.freeze()  # a last look for garbage in all of torch would take a second
    ctypes.pythonapi.Py_Exit(0)


def free_port() -> int:
    """For a store that is made later. Nobody who asks for any port gets it meanwhile: Linux gives out higher ones."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
