"""What attach takes where no codec is named (hooks/default.py): by optimizer, by type of value, by device."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import streams
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradzip
from gradzip.hooks import default, entry
from gradzip.policy import Rules

TIMEOUT = timedelta(seconds=60)
NOISE, FINER, NEAR, EXACT = "noise", "noise:share=0.3%", "gcomp", "gcomp:mode=lossless"
MUON = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(MUON is None, reason="this torch has no Muon")
TYPES = [each for each in vars(torch.optim).values() if isinstance(each, type) and Optimizer in each.__mro__[1:]]


class MyAdam(Adam):
    pass


class MyAdamW(AdamW):
    pass


def weights(*types: torch.dtype) -> dict[torch.Tensor, str]:
    """Parameters and their names: matrices, as Muon takes no vectors."""
    return {nn.Parameter(torch.ones(4, 4, dtype=kind)): f"{i}.weight" for i, kind in enumerate(types)}


def taken(names: dict[torch.Tensor, str], *optimizers: Optimizer, against: str | None = None) -> default.Default:
    return default.choose(optimizers, names, against)


@pytest.mark.parametrize("kind", [*TYPES, MyAdam, MyAdamW], ids=lambda kind: kind.__name__)
def test_noise_is_taken_with_the_optimizers_that_were_measured_and_no_other(kind: Any) -> None:
    names = weights(torch.float32)
    found = taken(names, kind(names))
    assert found.policy == {Adam: NOISE, AdamW: NOISE, SGD: NOISE, MUON: FINER}.get(kind, NEAR)
    assert re.search(rf"\b{kind.__name__}\b", found.words)
    assert found.sentence.startswith(f"By default it is {found.policy}")


@pytest.mark.parametrize("how", ["foreach", "fused", "capturable", "amsgrad"])
def test_variants_of_one_type_are_that_type(how: str) -> None:
    names = weights(torch.float32)
    option: dict[str, Any] = {how: True}
    assert taken(names, AdamW(names, **option)).policy == NOISE


def test_momentum_does_not_matter() -> None:
    names = weights(torch.float32)
    assert taken(names, SGD(names, lr=0.1, momentum=0.9, nesterov=True)).policy == NOISE


@needs_muon
@pytest.mark.parametrize(
    ("others", "policy"), [((), FINER), ((AdamW,), FINER), ((SGD, Adam), FINER), ((MyAdam,), NEAR)]
)
def test_muon_beside_others(others: tuple[type[Optimizer], ...], policy: str) -> None:
    names = weights(*[torch.float32] * (1 + len(others)))
    assert MUON is not None
    optimizers = [kind([p]) for kind, p in zip((MUON, *others), names)]
    for order in (optimizers, optimizers[::-1]):
        assert taken(names, *order).policy == policy


@pytest.mark.parametrize(("others", "policy"), [((Adam,), NOISE), ((SGD,), NOISE), ((torch.optim.NAdam,), NEAR)])
def test_mixed_lists(others: tuple[type[Optimizer], ...], policy: str) -> None:
    names = weights(*[torch.float32] * (1 + len(others)))
    optimizers = [kind([p]) for kind, p in zip((AdamW, *others), names)]
    for order in (optimizers, optimizers[::-1]):
        assert taken(names, *order).policy == policy


def test_without_an_optimizer_nothing_is_lost() -> None:
    found = taken(weights(torch.float32))
    assert found.policy == EXACT
    assert found.sentence.endswith("as no optimizer was given; attach(model, optimizer) sends less")


def test_parameters_that_no_optimizer_holds_are_not_given_noise() -> None:
    names = weights(torch.float32, torch.float32)
    found = taken(names, AdamW([next(iter(names))]))
    assert (found.policy, "no optimizer that attach was given holds '1.weight'" in found.words) == (NEAR, True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_values_of_16_bits_take_noise(kind: torch.dtype) -> None:
    names = weights(kind)
    assert taken(names, SGD(names)).policy == NOISE


def test_values_of_64_bits_go_as_they_are() -> None:
    names = weights(torch.float32, torch.float64)
    found = taken(names, AdamW(names))
    assert found.policy == Rules({"1.weight": "identity", "*": NEAR})
    assert found.words == (
        "identity for values of 64 bits, gcomp for the others, as noise is for float32, bfloat16 and float16, and "
        "'1.weight' is torch.float64"
    )
    alone = weights(torch.complex64)
    assert taken(alone, SGD(alone)).policy == NEAR


def test_names_are_no_patterns() -> None:
    (parameter,) = weights(torch.float64)
    policy = taken({parameter: "blocks[0].weight"}, SGD([parameter])).policy
    assert isinstance(policy, Rules)
    assert policy.option("blocks[0].weight", (64, 64)).codec == "identity"
    assert policy.option("blocks0.weight", (64, 64)).codec == NEAR


class OnGpu(nn.Parameter):
    device = torch.device("cuda", 0)


def on_gpu(backend: str) -> Any:
    """Stands in for a DDP model on a GPU whose group has this backend."""
    net = nn.Module()
    net.weight = OnGpu(torch.ones(4, 4))
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))
    return SimpleNamespace(module=net, parameters_to_ignore=set(), process_group=group)


@pytest.mark.parametrize(
    ("backend", "version", "policy", "reason"),
    [
        ("nccl", "2.8.0", NOISE, ""),
        ("nccl", "2.7.1", NEAR, "this is torch 2.7.1: install torch 2.8 or newer"),
        ("gloo", "2.8.0", NEAR, "the process group's backend for GPUs is gloo"),
    ],
)
def test_gpus_that_cannot_send_noise(
    monkeypatch: pytest.MonkeyPatch, backend: str, version: str, policy: str, reason: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model = on_gpu(backend)
    found = entry._default(model, [AdamW(model.module.parameters())])
    assert found is not None
    assert found.policy == policy
    assert reason in found.words


# -- by real ranks -----------------------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def net(*types: torch.dtype) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*(nn.Linear(40, 40, dtype=kind) for kind in types)))


def train(model: DistributedDataParallel, optimizer: Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=generator)
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def options(handle: gradzip.Handle) -> set[str]:
    return {tensor["option"] for tensor in handle.stats()["tensors"].values()}


def attach_all(rank: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    lines = _Lines()
    logging.getLogger("gradzip").addHandler(lines)
    for name, kind, dtype in (
        ("AdamW", AdamW, torch.float32),
        ("NAdam", torch.optim.NAdam, torch.float32),
        ("float64", AdamW, torch.float64),
        ("Muon", None, torch.float32),
    ):
        if kind is None and MUON is None:
            continue
        model = net(dtype, dtype)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizers = [MUON(matrices), AdamW(vectors)] if kind is None and MUON else [kind(model.parameters())]  # type: ignore[misc]
        lines.texts.clear()
        handle = gradzip.attach(model, optimizers, timeout=TIMEOUT)
        for optimizer in optimizers:
            train(model, optimizer)
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        assert torch.equal(*both)
        assert flat.isfinite().all()
        said[name] = options(handle), lines.texts[0] if lines.texts else "", handle.stats()["noise"]
        handle.detach()
    model = net(torch.float32)
    kinds = (AdamW, MyAdamW)
    with pytest.raises(gradzip.PeerError) as differs:
        gradzip.attach(model, kinds[rank](model.parameters()), timeout=TIMEOUT)
    said["differs"] = str(differs.value)
    handle = gradzip.attach(model, timeout=TIMEOUT)
    said["no optimizer"] = options(handle)
    handle.detach()
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    return run_ranks(2, attach_all, deadline=300)


@pytest.mark.parametrize(
    ("case", "expected", "line"),
    [
        (
            "AdamW",
            {"noise"},
            ". By default it is noise with AdamW, as a budget of 1 % cost less than 0.1 % of the loss where measured; ",
        ),
        ("NAdam", {"gcomp", "identity"}, ". By default it is gcomp and not noise, as nobody has measured what noise "),
        ("float64", {"identity"}, ". By default it is identity for values of 64 bits, as noise is for float32, "),
        pytest.param(
            "Muon",
            {"noise:share=0.003"},
            "By default it is noise:share=0.3% with AdamW and Muon, as a larger budget costs ",
            marks=needs_muon,
        ),
    ],
)
def test_attach_takes_it_trains_and_says_why(
    said: list[dict[str, Any]], case: str, expected: set[str], line: str
) -> None:
    for rank, each in enumerate(said):
        found, text, noise = each[case]
        assert found == expected
        assert (line in text) == (rank == 0)
        assert bool(noise) == any(option.startswith("noise") for option in expected)


def test_without_an_optimizer_ranks_send_losslessly(said: list[dict[str, Any]]) -> None:
    assert all(each["no optimizer"] == {EXACT, "identity"} for each in said)


def test_ranks_that_come_to_different_defaults_are_told_at_attach(said: list[dict[str, Any]]) -> None:
    for each in said:
        assert each["differs"].startswith(
            "ranks are set up differently. Rank 0: the default is noise with AdamW, as a budget of 1 % cost less than "
            "0.1 % of the loss where measured. Rank 1: the default is gcomp and not noise, as nobody has measured what "
            "noise costs with MyAdamW of "
        )


def on_streams(rank: int) -> tuple[set[str], str]:
    """As on a GPU that can send noise."""
    streams.install()
    model = net(torch.float32, torch.float32)
    optimizer = AdamW(model.parameters())
    handle = gradzip.attach(model, optimizer, timeout=TIMEOUT)
    train(model, optimizer)
    found = options(handle), handle.stats()["runner"]
    handle.detach()
    return found


def test_the_default_goes_by_streams_where_there_are_any() -> None:
    assert run_ranks(2, on_streams) == [({"noise"}, "stream")] * 2


def older(rank: int) -> tuple[str, set[str], set[str], float]:
    """A state that was saved with another default, where noise is the default now."""
    model = net(torch.float32, torch.float32)
    optimizer = AdamW(model.parameters())
    handle = gradzip.attach(model, optimizer, NEAR, timeout=TIMEOUT)
    train(model, optimizer)
    state = handle.state_dict()
    handle.detach()
    handle = gradzip.attach(model, optimizer, timeout=TIMEOUT)
    with pytest.raises(gradzip.Unsupported) as refused:
        handle.load_state_dict(state)
    handle.detach()
    handle = gradzip.attach(model, optimizer, NEAR, timeout=TIMEOUT)
    handle.load_state_dict(state)
    train(model, optimizer, 1)
    before = options(handle)
    handle.set_policy(NOISE)
    train(model, optimizer)
    return str(refused.value), before, options(handle), handle.stats()["steps"]


def test_a_checkpoint_of_the_former_default_is_refused_with_its_cure_which_works() -> None:
    for text, before, after, steps in run_ranks(2, older):
        assert text == (
            "the state is of another codec: '0.weight' had gcomp and has noise now, by default (noise with AdamW, "
            "as a budget of 1 % cost less than 0.1 % of the loss where measured). Attach with the policy that it was "
            "saved under, such as 'gcomp', load it, then call set_policy"
        )
        assert (before, after, steps) == ({"gcomp", "identity"}, {"noise"}, 7)


def test_the_rule_in_words_is_the_rule() -> None:
    finer = ", noise:share=0.3% with Muon" if MUON else ""
    assert default.in_words() == (
        f"noise with Adam or AdamW or SGD{finer}, gcomp with other optimizers, gcomp:mode=lossless without one"
    )
    assert default.in_words(streams=False) == "gcomp; gcomp:mode=lossless without an optimizer"
