"""Ranks that meet with an accident, and what the others say: `python tests/faults.py` prints times and words.

Four processes reduce in a loop, started by hand and not by torchrun, which would end the healthy ones at once. After
two seconds something happens to one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 4
HEARTBEAT = 5  # seconds; 30 by default
FAULTS = ("kill", "kill the store's host", "stop", "another codec", "a corrupt frame", "an exception", "asleep")


def rank_main() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradzip
    from gradzip.collectives import coder

    torch.set_num_threads(1)
    rank, fault, victim = int(os.environ["RANK"]), os.environ["FAULT"], int(os.environ["VICTIM"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)))
    policy = "cast" if fault == "another codec" and rank == victim else "gcomp:mode=lossless"
    said: dict[str, Any] = {"rank": rank}
    try:
        handle = gradzip.attach(model, None, policy, heartbeat=timedelta(seconds=HEARTBEAT))
        # In its first steps DDP has exchanges of its own, for which it answers itself.
        for _ in range(0 if fault == "another codec" else 3):
            model(torch.randn(8, 256)).square().mean().backward()
        start = time.monotonic()
        print(json.dumps({"ready": rank}), flush=True)
        encode, steps = coder.TensorCoder.encode, 0
        while time.monotonic() - start < (60 if fault == "asleep" else 12):
            if rank == victim and fault == "asleep" and steps == 2:
                time.sleep(12)  # longer than two heartbeats
            if rank == victim and time.monotonic() - start > 2 and fault in ("a corrupt frame", "an exception"):

                def broken(self: Any, *args: Any) -> Any:
                    if fault == "an exception":
                        raise ArithmeticError("the codec lost count")
                    blob = encode(self, *args)
                    blob.data[8:32] ^= 85
                    return blob

                coder.TensorCoder.encode = broken
            model(torch.randn(8, 256)).square().mean().backward()
            steps += 1
            if fault == "asleep" and steps >= 6:
                break
        said["steps"] = steps
    except Exception as error:
        kept = handle.error if "handle" in locals() else error
        said["error"] = f"{type(kept).__name__}: {kept}"[:400]
        said["raised"] = str(error)[:100]
    said["at"] = time.time()
    print(json.dumps(said), flush=True)
    os._exit(0) if fault.startswith("kill the") else None  # the store is gone: destroying the group would wait for it
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def run(fault: str) -> dict[str, Any]:
    """What every other rank said, and how long after the accident."""
    victim = 0 if fault in ("kill the store's host", "asleep") else 3
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"FAULT": fault, "VICTIM": victim, "TORCH_CPP_LOG_LEVEL": "FATAL", "GRADZIP_ENGINE": "reference"}
    processes = []
    for rank in range(WORLD):
        own = os.environ | {name: str(value) for name, value in (common | {"RANK": rank}).items()}
        command = [sys.executable, __file__, "--rank"]
        processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline()
        time.sleep(2)
        if fault.startswith("kill"):
            processes[victim].send_signal(signal.SIGKILL)
        elif fault == "stop":
            processes[victim].send_signal(signal.SIGSTOP)
        moment, words, codes = time.time(), {}, {}
        for rank, process in enumerate(processes):
            if rank == victim and fault in ("kill", "kill the store's host", "stop"):
                continue
            out, err = process.communicate(timeout=90)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            words[rank] = lines[-1] if lines else {"error": f"nothing; stderr: {err[-400:]}"}
            words[rank]["seconds"] = round(words[rank].get("at", moment) - moment, 2)
            codes[rank] = process.returncode
            if process.returncode:
                words[rank]["stderr"] = err[-600:]
        return {"victim": victim, "words": words, "codes": codes}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        rank_main()
        return
    for fault in sys.argv[1:] or FAULTS:
        result = run(fault)
        print(f"\n{fault} (rank {result['victim']})")
        for rank, said in result["words"].items():
            text = said.get("error") or f"no error, {said['steps']} steps"
            print(f"  rank {rank} after {said['seconds']:6.2f} s, exit code {result['codes'][rank]}: {text}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
