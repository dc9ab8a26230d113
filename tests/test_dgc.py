"""Deep Gradient Compression against a plain transcription of its algorithm."""

from __future__ import annotations

import pytest
import torch
from conftest import generator, gradient

import gradzip
from gradzip import Context, parse
from gradzip.codecs.dgc import DGC
from gradzip.errors import Unsupported


def transcribed(gradients: list[torch.Tensor], ratio: float, momentum: float, clip: float) -> list[torch.Tensor]:
    """What is sent in each step, value by value as the paper's algorithm says."""
    u, v, sent = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]), []
    for g in gradients:
        if clip and float(g.norm()) > clip:
            g = g * (clip / g.norm())
        u = momentum * u + g
        v = v + u
        mask = torch.zeros_like(v)
        mask[v.abs().topk(round(ratio * v.numel())).indices] = 1
        sent.append(v * mask)
        u, v = u * (1 - mask), v * (1 - mask)
    return sent


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_it_follows_the_algorithm(clip: float) -> None:
    rng = generator(1)
    gradients = [torch.randn(1000, generator=rng) * 0.02 * (i + 1) for i in range(12)]
    codec, state = DGC(ratio=0.01, momentum=0.8, clip=clip * 2), dict[str, torch.Tensor]()
    for step, (g, expected) in enumerate(zip(gradients, transcribed(gradients, 0.01, 0.8, clip))):
        y = codec.decode(codec.encode(g, Context("w", step, world=4, state=state)))
        assert torch.allclose(y, expected, rtol=1e-5)
        assert torch.equal(y != 0, expected != 0)


def test_all_that_momentum_would_apply_arrives_in_the_end() -> None:
    g, codec, state = gradient(200), DGC(ratio=0.05, momentum=0.5), dict[str, torch.Tensor]()
    total = torch.zeros(200)
    for step in range(400):
        x = g if step == 0 else torch.zeros(200)
        total += codec.decode(codec.encode(x, Context("w", step, state=state)))
    # a value that is sent leaves its later momentum behind: between the gradient and its whole effect
    assert bool((total.abs() >= g.abs() * 0.999).all())
    assert bool((total.abs() <= g.abs() * 2.001).all())


def test_where_all_is_sent_it_is_plain_momentum() -> None:
    rng = generator(2)
    codec, state, m = DGC(ratio=1.0, momentum=0.9), dict[str, torch.Tensor](), torch.zeros(100)
    for step in range(5):
        g = torch.randn(100, generator=rng)
        m = 0.9 * m + g
        assert torch.equal(codec.decode(codec.encode(g, Context("w", step, state=state))), m)


def test_the_warm_up_sends_more_at_first() -> None:
    codec = DGC(ratio=0.001, warmup=40)
    assert [codec.ratio_at(s) for s in (0, 9, 10, 20, 30, 39, 40)] == [
        *(0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.00390625, 0.001)
    ]
    assert DGC(ratio=0.1, warmup=40).ratio_at(39) == 0.1
    sizes = [codec.encode(gradient(10_000), Context(step=s)).numel() for s in (0, 10, 20, 30, 40)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == codec.bound(10_000, torch.float32)


def test_what_is_kept_carries_no_loss_scale() -> None:
    codec, plain, scaled = DGC(ratio=0.01), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for step, scale in enumerate((1024.0, 1024.0, 512.0, 2048.0)):
        g = gradient(1000, seed=step)
        a = codec.decode(codec.encode(g, Context("w", step, state=plain)))
        b = codec.decode(codec.encode(g * scale, Context("w", step, scale=scale, state=scaled)))
        assert torch.equal(a * scale, b)
    assert torch.equal(plain["own_v"], scaled["own_v"])


def test_what_halves_round_away_is_kept() -> None:
    g, state = gradient(1000, dtype=torch.bfloat16), dict[str, torch.Tensor]()
    state["own_v"] = torch.full((1000,), 1e-5)
    y = DGC(ratio=1.0, momentum=0).encode(g, Context("w", state=state))
    assert torch.allclose(gradzip.decode(y).float() + state["own_v"], g.float() + 1e-5, atol=1e-9)
    assert float(state["own_v"].abs().max()) > 0


def test_state_is_replaced_and_never_written_into() -> None:
    state: dict[str, torch.Tensor] = {}
    codec = DGC(ratio=0.1)
    codec.encode(gradient(100), Context(state=state))
    before = dict(state)
    copies = {key: value.clone() for key, value in before.items()}
    assert set(before) == {"own_u", "own_v"}
    codec.encode(gradient(100, seed=1), Context(state=state))
    assert all(torch.equal(before[key], copies[key]) for key in before)
    assert all(state[key] is not before[key] for key in before)


@pytest.mark.parametrize("spec", ["momentum=1", "momentum=-0.1", "clip=-1", "warmup=-1", "ratio=0", "clip=inf"])
def test_nonsense_is_refused(spec: str) -> None:
    with pytest.raises(Unsupported):
        parse(f"dgc:{spec}")
