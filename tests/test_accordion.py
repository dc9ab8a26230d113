"""Accordion: the rule of the paper, decided alike on all ranks, and resumed."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import generator, gradient

import gradzip
from gradzip import Accordion, Option, Policy
from gradzip.accordion import exact_norm
from gradzip.errors import Unsupported
from gradzip.policy import PLAIN, Adaptive, Rules

LOW, HIGH = Option("powersgd:rank=4"), Option("powersgd")
BIG = (64, 64)


def accordion(**options: float) -> Accordion:
    return Accordion(low="powersgd:rank=4", high="powersgd:rank=1", **options)  # type: ignore[arg-type]


def step(policy: Accordion, sizes: dict[str, float], rate: float = 0.1, scale: float = 1.0) -> dict[str, Option]:
    """One step with constant gradients of those sizes; the options that it was taken with."""
    options = {name: policy.option(name, BIG) for name in sizes}
    for name, size in sizes.items():
        policy.observe(name, torch.full(BIG, size * scale), scale)
    policy.end_step([rate])
    return options


def steps(policy: Accordion, count: int, **sizes: float) -> list[bool]:
    """Whether layer `a` was at low compression, in each of some steps."""
    return [step(policy, sizes)["a"] == LOW for _ in range(count)]


def test_it_is_a_policy_that_learns() -> None:
    assert isinstance(accordion(), Policy)
    assert isinstance(accordion(), Adaptive)
    assert not isinstance(Rules({}), Adaptive)
    assert gradzip.Accordion is Accordion


def test_the_first_window_and_the_one_after_it_are_critical() -> None:
    """There is nothing to compare the first window with, so the first check leaves all as it is."""
    policy = accordion(window=3)
    assert steps(policy, 9, a=1.0) == [True] * 6 + [False] * 3
    assert [entry["step"] for entry in policy.history] == [3, 6, 9]
    assert [entry["critical"] for entry in policy.history] == [["a"], [], []]
    assert policy.history[1]["ratios"] == {"a": 0.0}


@pytest.mark.parametrize(
    ("size", "critical"), [(1.0, False), (1.49, False), (1.5, True), (4.0, True), (0.51, False), (0.5, True), (0, True)]
)
def test_a_change_by_half_is_critical(size: float, critical: bool) -> None:
    policy = accordion(window=2)
    steps(policy, 4, a=1.0)
    steps(policy, 2, a=size)
    assert steps(policy, 1, a=size) == [critical]


def test_layers_are_judged_each_by_itself() -> None:
    policy = accordion(window=1)
    for sizes in ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}):
        step(policy, sizes)
    assert step(policy, {"a": 1.0, "b": 3.0}) == {"a": HIGH, "b": LOW}
    assert step(policy, {"a": 1.0, "b": 3.0}) == {"a": HIGH, "b": HIGH}


def test_it_is_the_norm_of_the_sum() -> None:
    """Gradients that cancel have no norm, however large each of them is."""
    policy = accordion(window=2)
    for sign in (1, 1, 1, 1, 1, -1):
        step(policy, {"a": float(sign)})
    assert policy.history[1]["ratios"] == {"a": 0.0}
    assert policy.history[2]["ratios"] == {"a": 1.0}


def test_a_norm_of_zero_before_is_critical() -> None:
    policy = accordion(window=1)
    for size in (0.0, 0.0):
        step(policy, {"a": size})
    assert step(policy, {"a": 1.0}) == {"a": LOW}


def test_a_drop_of_the_learning_rate_makes_all_critical_until_the_next_check() -> None:
    policy = accordion(window=4)
    steps(policy, 8, a=1.0)
    taken = [step(policy, {"a": 1.0}, rate)["a"] == LOW for rate in (0.1, 0.01, 0.01, 0.01, 0.01)]
    assert taken == [False, False, True, True, False]
    assert [entry["cause"] for entry in policy.history] == ["check", "check", "learning rate", "check"]


@pytest.mark.parametrize(
    ("lr_drop", "rates", "drops"),
    [
        (2, [0.1, 0.06, 0.05], 1),  # by and by, within a window
        (2, [0.1, 0.2, 0.15, 0.11], 0),
        (2, [0.1, 0.2, 0.1], 1),  # counted from the highest
        (10, [0.1, 0.1 * 0.1, 0.01 * 0.1], 2),
        (1, [0.3, 0.2, 0.1, 0.1, 0.2, 0.19], 3),  # the paper's rule
        (2, [0.0, 0.0, 0.1], 0),
    ],
)
def test_drops(lr_drop: float, rates: list[float], drops: int) -> None:
    policy = accordion(window=100, lr_drop=lr_drop)
    for rate in rates:
        step(policy, {"a": 1.0}, rate)
    assert len(policy.history) == drops


def test_cosine_schedules_do_not_trigger_it_for_ever() -> None:
    policies = [accordion(window=50, lr_drop=lr_drop) for lr_drop in (1, 2)]
    for policy in policies:
        for i in range(1000):
            step(policy, {"a": 1.0}, 0.05 * (1 + math.cos(math.pi * i / 1000)))
    counts = [sum(entry["cause"] == "learning rate" for entry in policy.history) for policy in policies]
    assert counts[0] == 999
    assert counts[1] <= 12  # the last steps halve the rate again and again


def test_one_group_of_several_is_enough() -> None:
    policy = accordion(window=100)
    policy.end_step([0.1, 0.5])
    policy.end_step([0.1, 0.2])
    assert len(policy.history) == 1


def test_epochs() -> None:
    """One epoch out of three is measured; others hold no sums."""
    policy = accordion(epochs=3)
    taken = []
    for epoch in range(8):
        for _ in range(2):
            taken.append(step(policy, {"a": 1.0 if epoch != 1 else 100.0})["a"] == LOW)
        assert ("sum/a" in policy.state_dict()) == (epoch % 3 == 0)
        policy.end_epoch()
    assert taken == [True] * 8 + [False] * 8
    assert [entry["step"] for entry in policy.history] == [2, 8, 14]


def test_the_loss_scale_does_not_matter() -> None:
    plain, scaled = accordion(window=2), accordion(window=2)
    for i in range(6):
        step(plain, {"a": 1.0 + i})
        step(scaled, {"a": 1.0 + i}, scale=2.0 ** (i + 3))
    assert plain.history == scaled.history


def test_layers_without_a_choice_cost_nothing() -> None:
    policy = Accordion(Rules({"a": "powersgd:rank=4", "*": "topk"}), Rules({"a": "powersgd", "*": "topk"}), window=10)
    assert policy.option("bias", (64,)) == PLAIN
    assert policy.option("b", BIG) == Option("topk")
    assert policy.option("a", BIG) == LOW
    for name in ("a", "b", "bias"):
        policy.observe(name, torch.ones(BIG))
    assert [key for key in policy.state_dict() if key.startswith("sum/")] == ["sum/a"]


def test_it_resumes_within_a_window() -> None:
    rng = generator(1)
    gradients = [torch.randn(BIG, generator=rng).bfloat16() * (2 + math.sin(i)) for i in range(40)]

    def run(policy: Accordion, first: int, last: int) -> list[Option]:
        taken = []
        for i in range(first, last):
            taken.append(policy.option("a", BIG))
            policy.observe("a", gradients[i])
            policy.end_step([0.1 if i < 25 else 0.01])
        return taken

    straight, first, second = accordion(window=6), accordion(window=6), accordion(window=6)
    expected = run(straight, 0, 40)
    assert {str(o) for o in expected} == {str(LOW), str(HIGH)}
    before = run(first, 0, 27)
    second.load_state_dict(first.state_dict())
    assert before + run(second, 27, 40) == expected
    ours, theirs = second.state_dict(), straight.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)
    with pytest.raises(Unsupported, match="another policy"):
        second.load_state_dict({"steps": 1, "epochs": 0, "plan/a": 3})


def test_state_is_a_copy() -> None:
    policy = accordion(window=10)
    step(policy, {"a": 1.0})
    saved = policy.state_dict()
    step(policy, {"a": 1.0})
    assert torch.equal(torch.as_tensor(saved["sum/a"]), torch.ones(BIG))


@pytest.mark.parametrize("numel", [0, 1, 1000, 100_000])
@pytest.mark.parametrize("scale", [1.0, 1e-35, 1e35])
def test_norms_are_norms_in_any_order(numel: int, scale: float) -> None:
    x = gradient(numel) * scale
    norm = exact_norm(x)
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-4)
    shuffled = x[torch.randperm(numel, generator=generator(3))]
    assert exact_norm(shuffled) == norm
    assert exact_norm(x.view(-1, 2).t() if numel % 2 == 0 else x.view(1, -1)) == norm


def test_norms_of_many_values_add_up_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gradient(10_000)
    norm = exact_norm(x)
    monkeypatch.setattr("gradzip.accordion._CHUNK", 64)
    assert exact_norm(x) == norm
    assert math.isnan(exact_norm(torch.tensor([1.0, math.nan])))
    assert exact_norm(torch.tensor([1.0, math.inf])) == math.inf


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"epochs": 0}, {"threshold": 0}, {"lr_drop": 0.5}, {"threshold": math.nan}]
)
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(Unsupported, match=next(iter(options))):
        accordion(**options)


def test_codecs_must_exist() -> None:
    with pytest.raises(Unsupported, match="Did you mean 'powersgd'"):
        Accordion("powersdg", "powersgd")
