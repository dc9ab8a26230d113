"""Gradients made on the spot: the training run, its snapshots and their cache."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from conftest import same_bits

from gradzip import capture
from gradzip.capture import ModelSize, Progress, Snapshot, train
from gradzip.errors import Unsupported

TINY = ModelSize(width=32, blocks=1, batch=1)


@pytest.mark.parametrize("size", [TINY, capture.DEMO, capture.BENCH])
def test_the_parameter_count_is_right(size: ModelSize) -> None:
    with torch.device("meta"):
        model = capture.ByteModel(size)
    assert sum(p.numel() for p in model.parameters()) == size.parameters


def test_the_bench_gradient_is_large_enough_to_leave_the_cache() -> None:
    assert capture.BENCH.parameters * 4 >= 40_000_000


def test_the_model_learns() -> None:
    told: list[Progress] = []
    train(TINY, steps=150, at=(1.0,), on_step=told.append)
    assert [p.step for p in told] == list(range(1, 151))
    assert told[-1].fraction == 1.0
    early, late = told[:10], told[-10:]
    assert sum(p.loss for p in late) < 0.8 * sum(p.loss for p in early)


def test_the_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = capture.ByteModel(TINY)
    tokens = torch.randint(256, (1, capture.CONTEXT))
    changed = tokens.clone()
    changed[0, 64:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :64], after[0, :64])
    assert not torch.equal(before[0, 64:], after[0, 64:])


def test_snapshots_are_whole() -> None:
    snapshots = train(TINY, steps=10, at=(0.2, 0.5, 1.0))
    assert [s.step for s in snapshots] == [2, 5, 10]
    for s in snapshots:
        for tensor in (s.gradient, s.theta, s.first, s.second):
            assert tensor.shape == (TINY.parameters,)
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
            assert tensor.isfinite().all()
        assert s.gradient.count_nonzero() > 0
        assert s.second.count_nonzero() > 0


def test_a_snapshot_steps_like_the_run_it_was_taken_from() -> None:
    before, after = train(TINY, steps=4, at=(0.75, 1.0))
    optimizer = before.optimizer()
    optimizer.step()
    (parameter,) = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(parameter.detach(), after.theta, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], after.second, rtol=1e-6, atol=0)
    assert not torch.equal(before.theta, after.theta), "the snapshot itself must not have moved"


def test_the_first_step_is_never_captured() -> None:
    assert [s.step for s in train(TINY, steps=3, at=(0.1, 0.2))] == [2, 3]


def test_a_run_by_the_clock_always_ends_with_all_snapshots() -> None:
    snapshots = train(TINY, seconds=1e-9, at=(0.1, 0.5, 1.0))
    assert [s.step for s in snapshots] == [4, 5, 6]


def test_runs_are_repeatable_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    (first,) = train(TINY, steps=3, at=(1.0,))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(456)
    (second,) = train(TINY, steps=3, at=(1.0,))
    assert same_bits(first.gradient, second.gradient)
    (other,) = train(TINY, steps=3, at=(1.0,), seed=1)
    assert not torch.equal(first.gradient, other.gradient)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"steps": 5, "seconds": 1.0},
        {"steps": 3},
        {"seconds": 0.0},
        {"steps": 9, "at": ()},
        {"steps": 9, "at": (0.5, 0.2)},
        {"steps": 9, "at": (0.0,)},
        {"steps": 9, "at": (1.5,)},
    ],
)
def test_impossible_runs_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(Unsupported):
        train(TINY, **wrong)  # type: ignore[arg-type]


def test_the_corpus_is_python() -> None:
    text = bytes(capture.corpus(200_000).tolist())
    assert len(text) == 200_000
    assert b"\ndef " in text


def test_a_python_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(Unsupported, match="too few Python sources"):
        capture.corpus()


def test_the_cache_saves_the_second_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = capture.cached(TINY, steps=3)
    assert [p.parent for p in tmp_path.rglob("*.pt")] == [tmp_path / "gradzip"]

    def never(*args: object, **kwargs: object) -> list[Snapshot]:
        raise AssertionError("trained again")

    monkeypatch.setattr(capture, "train", never)
    second = capture.cached(TINY, steps=3)
    assert (second.step, second.loss, second.lr) == (first.step, first.loss, first.lr)
    assert same_bits(second.gradient, first.gradient)
    assert same_bits(second.second, first.second)
    with pytest.raises(AssertionError, match="trained again"):
        capture.cached(TINY, steps=4)
