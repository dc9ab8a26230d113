"""States of checkpoints that were damaged in one field: each is refused by name, and nothing of it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import same_bits
from ranks import run_ranks
from training import Run, start

from gradzip import Accordion, Fixed, GradzipError, Policy
from gradzip.planner.auto import Pilot

POLICIES: dict[str, Callable[[], str | Policy]] = {
    "topk": lambda: "topk:ratio=0.05",
    "dgc": lambda: "dgc:ratio=0.05",
    "powersgd": lambda: "powersgd:rank=2",
    "powersgd-alternate": lambda: "powersgd:rank=2,alternate=true",
    "near": lambda: Fixed("gcomp:ulps=4096"),
    "shared book": lambda: Fixed("gcomp:mode=lossless,book=shared"),
    "accordion": lambda: Accordion("powersgd:rank=2", "powersgd:rank=1", window=2),
}
KEPT = {
    "topk": ["/residual/gradient/"],
    "dgc": ["/own_u", "/own_v"],
    "powersgd": ["/q", "/residual/gradient/"],
    "powersgd-alternate": ["/p", "/q", "/half"],
    "near": ["/own_lossless", "/residual/sum"],
    "shared book": ["book/lengths"],
    "accordion": ["policy/norm/", "policy/critical/", "policy/sum/", "policy/rate/0", "/q"],
}


def damages(value: Any) -> dict[str, Any]:
    """Values that cannot stand where this one does."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        bad = value.clone()
        bad.view(-1)[-1] = torch.nan
        infinite = value.clone()
        infinite.view(-1)[0] = -torch.inf
        return {
            "NaN": bad,
            "infinity": infinite,
            "short": value.reshape(-1)[:-1],
            "long": torch.cat([value.reshape(-1), value.reshape(-1)[:1]]),
            "integers": value.long(),
            "float16": value.half(),
            "a number": 1.0,
            "a string": "x",
            "None": None,
        }
    if isinstance(value, torch.Tensor):
        return {
            "short": value[:-1],
            "nines": torch.full_like(value, 9),
            "floats": value.float(),
            "a string": "x",
            "None": None,
        }
    common = {
        "negative": -1,
        "a string": "7",
        "None": None,
        "NaN": float("nan"),
        "a vector": torch.ones(3),
        "a list": [1],
    }
    return common | ({"a fraction": 1.5, "a truth": True} if isinstance(value, int) else {})


def snapshot(run: Run) -> dict[str, Any]:
    assert run.handle is not None
    return run.handle.state_dict()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    pairs = [(a[key], b[key]) for key in a]
    return all(
        (same_bits(x, y) if x.is_floating_point() else torch.equal(x, y)) if isinstance(x, torch.Tensor) else x == y
        for x, y in pairs
    )


def refusals(rank: int, name: str) -> dict[str, Any]:
    """Every field of a state damaged in every way; what is said of each."""
    logging.getLogger("gradzip").setLevel(logging.WARNING)
    run = start(POLICIES[name]())
    run.train(0, 53 if name == "shared book" else 5)
    assert run.handle is not None
    state = snapshot(run)
    said, changed = {}, []
    for key, value in state.items():
        if key.startswith("rank") and not key.startswith(f"rank{rank}/"):
            continue
        for how, bad in damages(value).items():
            try:
                run.handle.load_state_dict(state | {key: bad})
                said[f"{key}: {how}"] = "accepted"
            except GradzipError as error:
                said[f"{key}: {how}"] = str(error)
            if not equal(snapshot(run), state):
                changed.append(f"{key}: {how}")
        if key in ("steps", "world_size", "codecs", "version"):
            try:
                run.handle.load_state_dict({k: v for k, v in state.items() if k != key})
                said[f"{key}: missing"] = "accepted"
            except GradzipError as error:
                said[f"{key}: missing"] = str(error)
    run.handle.load_state_dict(state)
    run.train(53, 55)
    return {"said": said, "changed": changed, "finite": all(bool(p.isfinite().all()) for p in run.parameters())}


@pytest.mark.parametrize("name", POLICIES)
def test_every_damaged_field_is_refused_by_name(name: str) -> None:
    for found in run_ranks(2, refusals, name):
        assert found["finite"]
        assert found["changed"] == [], "a state that was refused has changed something"
        fields = {what.rpartition(": ")[0] for what in found["said"]}
        assert fields >= {"version", "steps", "world_size", "codecs"}
        for part in KEPT[name]:
            assert any(part in key for key in fields), f"nothing of {part} was damaged"
        for what, text in found["said"].items():
            key = what.rpartition(": ")[0].removeprefix("policy/")
            assert key.rpartition("/")[2] in text, f"{what}: {text}"


@pytest.mark.parametrize(
    "kept", [b"", b"[]", b"{}", b'{"reverted": 1}', b'{"reverted": true}', b'{"plan": 3, "reverted": true}', b"\xff", 7]
)
def test_damaged_plan_in_a_state_is_refused(kept: bytes | int) -> None:
    value = torch.tensor(list(kept), dtype=torch.uint8) if isinstance(kept, bytes) else kept
    with pytest.raises(GradzipError, match=r"auto\.plan"):
        Pilot.read_state({"auto.plan": value})
