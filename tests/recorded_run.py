"""A small training run as the report reads it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gradzip.report import Recorder

CODECS = ["gcomp", "gcomp:mode=lossless", "topk"]


class Handle:
    """Stands in for attach's: sends 1000 of 4000 bytes with each step."""

    def __init__(self) -> None:
        self.steps = 0

    def stats(self) -> dict[str, object]:
        self.steps += 1
        sent, raw = 1_000_000 * self.steps, 4_000_000 * self.steps
        return {
            "steps": self.steps,
            "bytes_sent": sent,
            "bytes_raw": raw,
            "coding_seconds": 0.002 * self.steps,
            "tensors": {},
        }


def record(path: Path) -> Path:
    """Two runs in one file, one of them with its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("plain", "<gcomp> & co"):
        recorder = Recorder(path, name, Handle(), compute_seconds=1e-9, identical=name != "plain")
        for step in range(1, 9):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 30)).square().mean()
            loss.backward()
            if name != "plain" and step in (1, 8):
                recorder.gradients(model, optimizer, CODECS)
            optimizer.step()
            recorder(loss=loss.item())
    return path
