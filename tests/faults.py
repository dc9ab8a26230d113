"""Ranks that meet with an accident, and what the others say: `python tests/faults.py` prints times and words.

Four processes reduce in a loop, not started by torchrun, which would end the healthy ones at once. After two seconds
something happens to one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORLD = 4
HEARTBEAT = 5  # seconds; 30 by default
NAP = 60  # seconds that a rank sleeps, twice the usual heartbeat
LINK_DOWN = "a link down"  # the only one that needs emulated hosts
# The bytes of a message that change. In front of a frame are its size and what program and step it is of.
DAMAGED = {"a corrupt frame": slice(48, 72), "a corrupt table": slice(16, 24), "a corrupt head": slice(8, 16)}
PLAIN = "kill in plain training"
BY_SIGNAL = dict.fromkeys(("kill", PLAIN, "kill the store's host"), signal.SIGKILL) | {"stop": signal.SIGSTOP}
# What carries data: the host runner, from memory of the CPU, of a stand-in of a GPU (fake_gpu.py), of a GPU, and with
# frames for whole messages; sums of sparse gradients; and the stream runner, over the model's own NCCL group.
WAYS = ("gloo", "stand-in", "gpu", "noise", "sparse", "stream")
ON_GPU = ("gpu", "stream")
FAULTS = (*BY_SIGNAL, LINK_DOWN, "another codec", *DAMAGED, "an exception", "asleep")


def victim_of(fault: str) -> int:
    return 0 if fault in ("kill the store's host", "asleep") else 3


def rank_main(say: Callable[[dict[str, Any]], None]) -> None:
    import fake_gpu
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradzip

    torch.set_num_threads(1)
    rank, fault, way = int(os.environ["RANK"]), os.environ["FAULT"], os.environ["WAY"]
    is_victim = rank == victim_of(fault)
    on_gpu = way in ON_GPU
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if way == "stand-in":
        fake_gpu.install()
    elif on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=3 * NAP))
    torch.manual_seed(0)
    first = nn.EmbeddingBag(256, 512, sparse=True) if way == "sparse" else nn.Linear(256, 512)
    model = DistributedDataParallel(nn.Sequential(first, nn.ReLU(), nn.Linear(512, 64)).to(device))

    def loss_of() -> torch.Tensor:
        x = torch.randint(256, (8, 16)) if way == "sparse" else torch.randn(8, 256, device=device)
        loss: torch.Tensor = model(x).square().mean()
        return loss

    coded = "noise" if way in ("noise", "stream") else "gcomp:mode=lossless"
    usual = gradzip.Fixed("identity") if fault == PLAIN else coded
    policy = "cast" if fault == "another codec" and is_victim else usual
    # Where nothing but its heartbeat says that a rank is gone; elsewhere a busy machine could stop one for that long.
    silent = fault in ("stop", LINK_DOWN) or way == "stream"
    heartbeat = timedelta(seconds=HEARTBEAT) if silent else None
    said: dict[str, Any] = {"rank": rank}
    try:
        handle = gradzip.attach(model, None, policy, heartbeat=heartbeat)
        # In its first steps DDP has exchanges of its own, for which it answers itself.
        for _ in range(0 if fault == "another codec" else 3):
            loss_of().backward()
        start, steps = time.monotonic(), 0
        say({"ready": rank})
        while steps < 6 if fault == "asleep" else time.monotonic() - start < 20:
            if is_victim and (steps == 2 if fault == "asleep" else time.monotonic() - start > 2):
                happen(fault)
                said["happened"] = time.time()
                is_victim = False
            loss = loss_of()
            loss.backward()
            loss.item()  # waits for the GPU, as users do
            steps += 1
        said["steps"] = steps
    except Exception as error:
        kept = handle.error if "handle" in locals() else error
        said["error"] = f"{type(kept).__name__}: {kept}"[:400]
    said["at"] = time.time()
    say(said)
    if fault == "kill the store's host" or fault == LINK_DOWN or on_gpu:
        os._exit(0)  # the store, or the model's own NCCL peer, is out of reach: destroying the group would wait for it
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def happen(fault: str) -> None:
    """What a rank does to itself; signals come from outside."""
    from gradzip.emulate.network import INTERFACE
    from gradzip.exchange.on_host import gcomp_from_device, generic, noise
    from gradzip.exchange.on_stream import noise as noise_on_stream
    from gradzip.exchange.peers.gloo import Gloo

    if fault == "asleep":
        time.sleep(NAP)
    elif fault == "an exception":

        def lost_count(*args: Any) -> Any:
            raise ArithmeticError("the codec lost count")

        generic.GenericCoder.encode = lost_count  # type: ignore[method-assign]
        gcomp_from_device.GCompDeviceCoder.encode = lost_count  # type: ignore[method-assign]
        noise._NoiseCoder.encode = lost_count  # type: ignore[method-assign]
        noise_on_stream.NoiseMessage.encode = lost_count  # type: ignore[method-assign]
    elif fault in DAMAGED:
        plainly = Gloo.send

        def damaged(self: Gloo, parts: Any, *rest: Any, place: slice) -> Any:
            parts = [(rank, data.clone()) for rank, data in parts]
            for _, data in parts:
                data[place] ^= 85
            return plainly(self, parts, *rest)

        Gloo.send = partialmethod(damaged, place=DAMAGED[fault])  # type: ignore[method-assign]
    elif fault == LINK_DOWN:
        ip = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
        assert ip is not None
        subprocess.run([ip, "link", "set", INTERFACE, "down"], check=True)


def run(fault: str, way: str = "gloo") -> dict[str, Any]:
    """What every rank said that could, how long after the accident, and the exit codes."""
    from ranks import engine_of_ranks

    settings = {"FAULT": fault, "WAY": way, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    settings |= (
        {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if way in ON_GPU else {"GRADZIP_ENGINE": engine_of_ranks()}
    )
    said, codes = _on_hosts(settings) if fault == LINK_DOWN else _on_loopback(fault, settings)
    moment = next(words["happened"] for words in said.values() if "happened" in words)
    for words in said.values():
        words["seconds"] = round(words["at"] - moment, 2)
    return {"victim": victim_of(fault), "words": said, "codes": codes}


def _on_hosts(settings: dict[str, str]) -> tuple[dict[int, dict[str, Any]], dict[int, int]]:
    from gradzip import emulate

    lines: list[str] = []
    command = [sys.executable, __file__, "--rank"]
    result = emulate.run(
        command, hosts=WORLD, measure=False, grace=60, env=settings, on_line=lambda line: lines.append(line.text)
    )
    said = [json.loads(line) for line in lines if '"at"' in line]
    assert any("happened" in words for words in said), lines
    return {words["rank"]: words for words in said}, dict(enumerate(result.codes))


def _on_loopback(fault: str, settings: dict[str, str]) -> tuple[dict[int, dict[str, Any]], dict[int, int]]:
    from ranks import fork_server, free_port

    settings |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    victim = victim_of(fault) if fault in BY_SIGNAL else None
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            here, there = fork_server.Pipe()
            own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "NCCL_HOSTID": f"rank{rank}"}
            process = fork_server.Process(target=_rank_on_loopback, args=(settings | own, there))
            with there:
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            ranks.append((process, stack.enter_context(here)))
        assert [pipe.recv() for _, pipe in ranks] == [{"ready": rank} for rank in range(WORLD)]
        if victim is not None:
            time.sleep(2)
            os.kill(ranks[victim][0].pid or 0, BY_SIGNAL[fault])
        moment, said, codes = time.time(), dict[int, dict[str, Any]](), dict[int, int]()
        others = {rank: both for rank, both in enumerate(ranks) if rank != victim}
        for rank, (_, pipe) in others.items():
            try:
                said[rank] = pipe.recv() if pipe.poll(3 * NAP) else {"error": "silence", "at": time.time()}
            except EOFError:
                said[rank] = {"error": "not a word", "at": time.time()}
            if fault in BY_SIGNAL or fault == "another codec":
                said[rank]["happened"] = moment
        for rank, (process, pipe) in others.items():
            pipe.close()
            process.join(3 * NAP)
            codes[rank] = process.exitcode
        return said, codes


def _rank_on_loopback(environment: dict[str, str], pipe: Connection) -> None:
    from ranks import leave

    os.environ |= environment

    def say(words: dict[str, Any]) -> None:
        pipe.send(words)
        if "at" in words:  # rank 0 has the store: nobody leaves before all have spoken
            with contextlib.suppress(EOFError):
                pipe.recv()

    rank_main(say)
    leave()


def _print(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        rank_main(_print)
        return
    way = next((name for name in WAYS if name in sys.argv[1:]), "gloo")
    for fault in [name for name in sys.argv[1:] if name != way] or FAULTS:
        result = run(fault, way)
        print(f"\n{fault} (rank {result['victim']}, {way})")
        for rank, said in sorted(result["words"].items()):
            text = said.get("error") or f"no error, {said['steps']} steps"
            print(f"  rank {rank} after {said['seconds']:6.2f} s, exit code {result['codes'][rank]}: {text}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
