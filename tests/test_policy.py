"""Policies, and the memory that is kept by parameter name."""

from __future__ import annotations

import weakref

import pytest
import torch

from gradzip import Option, Policy, parse
from gradzip.codecs.base import Apart, Kept
from gradzip.errors import Unsupported
from gradzip.exchange.message_codecs import route_of
from gradzip.feedback import Memory, clean_name
from gradzip.policy import PLAIN, TINY, Fixed, Rules, as_policy

BIG = (64, 64)


def test_fixed_gives_everything_the_same() -> None:
    policy = Fixed("topk:ratio=0.5@cpu/allgather")
    assert policy.option("w", BIG) == policy.option("b", (3,)) == Option("topk:ratio=0.5", "cpu", "allgather")


def test_rules_match_names_in_order() -> None:
    policy = Rules({"head.*": "identity", "*.weight": "powersgd:rank=2", "*": "topk"})
    assert policy.option("head.weight", BIG) == PLAIN
    assert policy.option("body.0.weight", BIG) == Option("powersgd:rank=2")
    assert policy.option("body.0.scale", BIG) == Option("topk")
    assert Rules({"body.*": "topk"}).option("head.weight", BIG) == PLAIN


def test_vectors_and_tiny_tensors_are_plain() -> None:
    policy = Rules({"*": "topk"})
    assert policy.option("bias", (1 << 20,)) == PLAIN
    assert policy.option("scalar", ()) == PLAIN
    assert policy.option("w", (TINY - 1, 1)) == PLAIN
    assert policy.option("w", (TINY, 1)) == Option("topk")
    assert Rules({"*": "topk"}, small=True).option("bias", (3,)) == Option("topk")
    momentum = Rules({"*": "dgc:ratio=0.01,momentum=0.8"})  # they need it too
    assert momentum.option("bias", (3,)) == Option("dgc:ratio=1.0,momentum=0.8")


def test_as_policy() -> None:
    for same in ("topk:ratio=0.010", parse("topk:ratio=0.01"), Option("topk:ratio=0.01")):
        policy = as_policy(same)
        assert isinstance(policy, Policy)
        assert policy.option("w", BIG) == Option("topk")  # the default ratio: in the codec's shortest form
        assert policy.option("b", (3,)) == PLAIN
    mine = Fixed("identity")
    assert as_policy(mine) is mine
    with pytest.raises(Unsupported, match="not a policy"):
        as_policy(3)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="Did you mean 'topk'"):
        as_policy("tokp")


def test_routes_fit_codecs() -> None:
    usual = {"identity": "allreduce", "cast": "alltoall", "randomk": "allreduce", "topk": "allgather"}
    usual |= {"gcomp": "alltoall", "powersgd": "factors"}
    assert {codec: route_of(parse(codec)) for codec in usual} == usual
    assert route_of(parse("identity"), "allgather") == "allgather"
    for codec, route in [("topk", "allreduce"), ("topk", "factors"), ("powersgd", "allgather"), ("gcomp", "allreduce")]:
        with pytest.raises(Unsupported):
            route_of(parse(codec), route)
    with pytest.raises(Unsupported, match="did you mean 'allgather'"):
        route_of(parse("topk"), "algather")
    assert route_of(parse("gcomp"), default="hierarchical") == "hierarchical"
    assert route_of(parse("cast"), "allreduce") == "allreduce"
    assert route_of(parse("gcomp"), "enc.cpu > ag.flat > dec.cpu") == "enc.cpu > ag.flat > dec.cpu"


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("module.layer.weight", "layer.weight"),
        ("module._orig_mod.layer.weight", "layer.weight"),
        ("_orig_mod.module.module.w", "w"),
        ("layer._orig_mod.w", "layer.w"),
        ("submodule.w", "submodule.w"),
        ("w", "w"),
    ],
)
def test_names_are_freed_of_wrappers(name: str, clean: str) -> None:
    assert clean_name(name) == clean


def test_residuals_count_only_once_committed() -> None:
    memory, x = Memory(rank=0), torch.ones(2, 3)
    assert memory.compensated("w", x) is x
    memory.lost("w", torch.full((2, 3), 0.5))
    assert memory.compensated("w", x) is x
    memory.drop()
    memory.commit()
    assert memory.compensated("w", x) is x
    memory.lost("w", torch.full((2, 3), 0.5))
    memory.commit()
    assert torch.equal(memory.compensated("w", x), torch.full((2, 3), 1.5))
    assert memory.compensated("w", x, stage="other") is x
    assert memory.compensated("v", x) is x
    memory.lost("w", None)  # a lossless encode sent it all
    memory.commit()
    assert memory.compensated("w", x) is x


def test_residuals_are_kept_unscaled() -> None:
    memory, x = Memory(rank=0), torch.zeros(4)
    memory.lost("w", torch.full((4,), 256.0), scale=1024.0)
    memory.commit()
    assert torch.equal(memory.compensated("w", x, scale=2.0), torch.full((4,), 0.5))


def test_residuals_of_halves_are_kept_in_full() -> None:
    memory = Memory(rank=0)
    memory.lost("w", torch.tensor([2.0**-20]))
    memory.commit()
    assert memory.compensated("w", torch.ones(1, dtype=torch.bfloat16)).item() == 1 + 2.0**-20


def test_codec_state_counts_only_once_committed() -> None:
    memory = Memory(rank=0)
    memory.state("w", "powersgd")["q"] = torch.ones(1)
    assert "q" in memory.state("w", "powersgd")  # within the step
    memory.drop()
    assert memory.state("w", "powersgd") == {}
    memory.state("w", "powersgd")["q"] = torch.ones(1)
    memory.commit()
    assert torch.equal(memory.state("w", "powersgd")["q"], torch.ones(1))
    assert memory.state("w", "gcomp") == {}


def test_memory_is_saved_flat_and_by_rank() -> None:
    memory = Memory(rank=1)
    memory.lost("a.w", torch.arange(6.0).view(2, 3))
    memory.state("a.w", "powersgd")["q"] = torch.ones(3, 1)
    memory.state("a.w", "qsgd")["count"] = 7
    memory.state("a.w", "dgc")["own_u"] = torch.ones(6)
    memory.commit()
    assert memory.held() == {"a.w": 4 * (6 + 3 + 6)}
    state = memory.state_dict()
    assert set(state) == {
        *("rank1/residual/gradient/a.w", "codec/powersgd/a.w/q", "codec/qsgd/a.w/count"),
        *("rank1/codec/dgc/a.w/own_u", "rank1/entries"),
    }
    same, stranger = Memory(rank=1), Memory(rank=0)
    shapes, cpu = {"a.w": torch.Size((2, 3))}, torch.device("cpu")
    same.load_state_dict(state, shapes, cpu)
    stranger.load_state_dict(state, shapes, cpu)
    assert stranger.state("a.w", "dgc") == {}
    assert torch.equal(same.state("a.w", "dgc")["own_u"], torch.ones(6))
    zero = torch.zeros(2, 3)
    assert torch.equal(same.compensated("a.w", zero), torch.arange(6.0).view(2, 3))
    assert stranger.compensated("a.w", zero) is zero
    assert stranger.state("a.w", "qsgd") == {"count": 7}
    memory.state("a.w", "qsgd")["list"] = []
    memory.commit()
    with pytest.raises(Unsupported, match="list"):
        memory.state_dict()


def test_residuals_of_unused_parameters_wait() -> None:
    for patient in (True, False):
        memory = Memory(rank=0, patient=patient)
        memory.lost("w", torch.ones(3))
        memory.commit()
        zero = torch.zeros(3)
        sent = memory.compensated("w", zero)
        memory.lost("w", None)
        memory.commit()
        assert torch.equal(sent, zero if patient else torch.ones(3))
        later = torch.ones(3) * 2
        assert torch.equal(memory.compensated("w", later), later + patient)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    memory = Memory(rank=0)
    memory.lost("a.w", torch.ones(2, 3))
    memory.commit()
    state, cpu = memory.state_dict(), torch.device("cpu")
    for shapes, left_out, words in (
        ({"a.v": torch.Size((2, 3))}, "", "no parameter 'a.w', did you mean 'a.v'"),
        ({"a.w": torch.Size((3, 2))}, "", r"a tensor of shape \(2, 3\).* not .* of shape \(3, 2\)"),
        ({"a.w": torch.Size((2, 3))}, "rank0/residual/gradient/a.w", "0 of the 1 entries.*load_checkpoint"),
    ):
        with pytest.raises(Unsupported, match=words):
            memory.load_state_dict({k: v for k, v in state.items() if k != left_out}, shapes, cpu)
    assert torch.equal(memory.compensated("a.w", torch.zeros(2, 3)), torch.ones(2, 3))


def test_residuals_are_kept_in_the_form_that_the_codec_asks_for() -> None:
    x = torch.tensor([1.0, 1 / 3, 257.0])
    for form, size, close in (("fp32", 12, 0.0), ("cpu", 12, 0.0), ("bf16", 6, 2.0**-8)):
        memory = Memory(rank=0)
        memory.forms["w"] = form
        memory.lost("w", 4 * x, scale=4.0)
        memory.commit()
        assert memory.held() == {"w": size}
        back = memory.compensated("w", torch.zeros(3), scale=2.0)
        assert back.dtype == torch.float32
        assert torch.allclose(back, 2 * x, rtol=close, atol=0)
        assert (close == 0) == torch.equal(back, 2 * x)


def test_what_waits_does_not_hold_the_memory_of_the_rest() -> None:
    """Residuals of many gradients may be parts of one tensor, of which one that is unused for long would be a part."""
    memory, names = Memory(rank=0, patient=True), ["used", "unused"]
    for step in range(3):
        both = torch.full((2, 1000), step + 1.0)
        gradients = [torch.ones(1000), torch.ones(1000) if step == 0 else torch.zeros(1000)]
        memory.compensated_all(names, gradients)
        memory.lost_all(names, list(both.unbind()))
        memory.commit()
    kept = memory._residuals["gradient/unused"]
    assert torch.equal(kept, torch.ones(1000))
    assert kept.untyped_storage().nbytes() == kept.nbytes
    assert torch.equal(memory._residuals["gradient/used"], torch.full((1000,), 3.0))


class Owner:
    """Of what is kept as one."""


def test_what_is_kept_as_one_is_what_each_keeps() -> None:
    """Whoever asks, and after steps that were dropped; what was there before goes away."""
    memory, names = Memory(rank=0), ("a", "guest", "b")
    owner, other = Owner(), Owner()

    def kept(value: float) -> Apart:
        return Apart(
            [torch.full((2,), value), None, torch.full((3,), value)], [{"q": torch.tensor(value)}, {}, {"q": 1}]
        )

    def step(value: float, owner: object = owner, succeeds: bool = True) -> tuple[Kept, list[torch.Tensor]]:
        gradients = [torch.zeros(2), torch.zeros(4), torch.zeros(3)]
        before = memory.of_all(owner, names, "qsgd", gradients, 2.0)
        memory.keep_all(owner, names, "qsgd", kept(value))
        memory.commit() if succeeds else memory.drop()
        return before, gradients

    memory.lost("guest", torch.ones(4))
    memory.lost("b", torch.full((3,), 5.0))
    memory.commit()
    before, _ = step(1.0)
    assert [None if r is None else float(r[0]) for r in before.residuals] == [None, 1.0, 5.0]
    assert before.states == [{}, {}, {}]
    again, _ = step(2.0, succeeds=False)
    assert again.residuals[0] is not None
    assert float(again.residuals[0][0]) == 1.0
    assert step(3.0)[0] is again, "nothing came of the step that was dropped"
    assert memory.residuals
    assert {key: float(value.view(-1)[0]) for key, value in memory._residuals.items()} == {}, "it is still together"
    assert float(memory.compensated("b", torch.zeros(3), 2.0)[0]) == 6.0
    before, _ = step(4.0)
    assert [None if r is None else float(r[0]) for r in before.residuals] == [3.0, None, 3.0]
    before, _ = step(7.0, owner=other)
    assert [None if r is None else float(r[0]) for r in before.residuals] == [4.0, None, 4.0]
    assert before.states[0]["q"] == 4.0
    assert memory.held() == {"a": 8 + 4, "b": 12}
    saved = memory.state_dict()
    assert {key for key in saved if "residual" in key} == {"rank0/residual/gradient/a", "rank0/residual/gradient/b"}
    step(8.0)
    memory.load_state_dict(saved, {"a": torch.Size([2]), "b": torch.Size([3])}, torch.device("cpu"))
    assert float(memory.compensated("a", torch.zeros(2))[0]) == 7.0

    (patient := Memory(rank=0, patient=True)).keep_all(owner, names, "qsgd", kept(1.0))
    patient.commit()
    assert float(patient._residuals["gradient/a"][0]) == 1.0, "each may have to wait by itself"
    halves = Memory(rank=0)
    halves.forms = {"b": "bf16"}
    halves.keep_all(owner, names, "qsgd", kept(1.0))
    halves.commit()
    assert halves._residuals["gradient/b"].dtype == torch.bfloat16
    assert halves._states["qsgd/a"]["q"] == 1.0


def test_what_sums_lost_goes_out_once_with_what_is_kept_as_one() -> None:
    memory, names, owner = Memory(rank=0), ("a", "b"), Owner()
    memory.lost("a", torch.ones(2), stage="sum1.2-4")
    memory.commit()
    memory.fold()
    sent, together = [], []
    for _ in range(3):
        gradients = [torch.zeros(4), torch.zeros(3)]
        memory.of_all(owner, names, "qsgd", gradients, 2.0)
        sent.append(gradients[0].tolist())
        memory.keep_all(owner, names, "qsgd", Apart([torch.zeros(4), None], [{}, {}]))
        memory.commit()
        together.append("a" in memory._bundles)
    assert sent == [[0, 0, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert together == [False, True, True]
    assert not any(key.startswith("folded") for key in memory.state_dict())


def test_what_is_kept_as_one_holds_nothing_else() -> None:
    """Neither whoever left it, who has DDP's buckets, nor what a step that was dropped would have left."""
    memory, owner = Memory(rank=0), Owner()
    for succeeds in (True, False):
        kept = Apart([torch.zeros(4)], [{}])
        memory.keep_all(owner, ("a",), "powersgd", kept)
        memory.commit() if succeeds else memory.drop()
    gone = [weakref.ref(owner), weakref.ref(kept)]
    del owner, kept
    assert [ref() for ref in gone] == [None, None]
    assert list(memory.state_dict()) == ["rank0/residual/gradient/a", "rank0/entries"]
