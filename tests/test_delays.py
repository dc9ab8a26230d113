"""Nothing depends on timing: random delays everywhere change neither what is issued, nor in which order, nor a bit.

Two models with a handle each share one backward and one channel. Their eight buckets take all routes in turn; policies
change, and the shared code book is made anew on the way.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from exchanges import HOSTS, LOCAL, whole_numbers
from ranks import TIMEOUT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradzip
from gradzip import Rules
from gradzip.exchange.peers import channel
from gradzip.routes import NAMED

LAYERS, SHAPE = 4, (48, 32)  # of each model; a layer is more than a bucket
CODECS = ("gcomp:mode=lossless,book=shared", "gcomp:mode=lossless", "zlib")
SWITCH_EVERY = 5  # steps


class Apart(nn.Module):
    """The gradient of each parameter is its input, so that means are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(SHAPE)) for _ in range(LAYERS))

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.layers, inputs)]).sum()


def delayed(rank: int, steps: int, longest: float) -> dict[str, Any]:
    """What was issued, in which order, whether all means were right, and the code books that were used."""
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)
    issued: dict[str, list[int]] = {}
    late = random.Random(rank)

    def probe(kind: str, stage: int, number: int) -> None:
        time.sleep(late.random() * longest)
        issued.setdefault(f"{kind}-{stage}", []).append(number)

    def before_hook(parameter: torch.Tensor) -> None:
        time.sleep(late.random() * longest)

    channel._probe = probe
    models = [DistributedDataParallel(Apart(), bucket_cap_mb=0.005) for _ in range(2)]
    for parameter in (p for model in models for p in model.parameters()):
        parameter.register_post_accumulate_grad_hook(before_hook)
    handles = [gradzip.attach(model, None, CODECS[0], timeout=TIMEOUT) for model in models]
    assert handles[0]._channel is handles[1]._channel
    choose, wrong = random.Random(7), list[int]()
    for step in range(steps):
        if step % SWITCH_EVERY == 1:
            routes = [choose.choice([name for name in NAMED if name != "allreduce"]) for _ in range(LAYERS)]
            codec = choose.choice(CODECS)
            choose.choice(handles).set_policy(Rules({f"layers.{i}": f"{codec}/{r}" for i, r in enumerate(routes)}))
        inputs = [[_input(rank, step, which, i) for i in range(LAYERS)] for which in range(2)]
        torch.stack([model(x) for model, x in zip(models, inputs)]).sum().backward()
        for which, model in enumerate(models):
            for i, parameter in enumerate(model.parameters()):
                mean = sum(_input(r, step, which, i) for r in range(HOSTS * LOCAL)) / (HOSTS * LOCAL)
                if not torch.equal(parameter.grad, mean):  # type: ignore[arg-type]  # sum() may give 0
                    wrong.append(step)
            model.zero_grad()
    books = [handle._books.state_dict().get("book/lengths") for handle in handles]
    return {
        "issued": issued,
        "wrong": wrong,
        "books": [None if book is None else torch.as_tensor(book).tolist() for book in books],
    }


def _input(rank: int, step: int, which: int, layer: int) -> torch.Tensor:
    return whole_numbers(SHAPE[0] * SHAPE[1], rank + 11 * step + 101 * which + 1009 * layer).view(SHAPE)


def check(steps: int, longest: float, deadline: float) -> None:
    results = run_ranks(HOSTS * LOCAL, delayed, steps, longest, deadline=deadline)
    for result in results:
        assert result["wrong"] == []
        assert result["issued"] == results[0]["issued"], "the order of issue depends on timing"
        assert result["books"] == results[0]["books"]
    coded = results[0]["issued"]["code-0"]
    assert len(coded) >= 2 * LAYERS * (steps - 1)  # DDP forms its buckets in the first step
    if steps > 2:
        assert any(book is not None for book in results[0]["books"]), "the code book was never made anew"


def test_delays_change_nothing() -> None:
    check(steps=8, longest=0.005, deadline=100)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_long_delays_change_nothing() -> None:
    check(steps=500, longest=0.05, deadline=2300)
