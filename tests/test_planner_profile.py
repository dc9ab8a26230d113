"""profile.json: fits, round trip, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import profile

from gradzip.errors import PlanError
from gradzip.planner import models
from gradzip.planner.profile import Line, Profile

ROOT = Path(__file__).parent.parent


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(latency: float, slope: float) -> None:
    fit = Line.fit([(size, latency + slope * size) for size in (1e3, 1e5, 1e7, 1e8)])
    for size in (1e3, 1e6, 1e9):
        assert fit.at(size) == pytest.approx(latency + slope * size, rel=1e-3)
    assert fit.residual < 1e-3


def test_a_fit_is_never_negative() -> None:
    falling = Line.fit([(1e3, 2.0), (1e6, 1.0)])
    assert falling.s_per_byte == 0
    assert falling.residual > 0.1
    steep = Line.fit([(1e6, 1e-3), (2e6, 1e-2)])
    assert steep.latency_s == 0
    assert Line.fit([(4.0, 2.0)]).at(8.0) == 4.0


def test_small_sizes_tell_the_latency_and_large_ones_the_rate() -> None:
    points = [(1e3, 1e-3), (1e8, 1.0), (2e8, 2.2)]
    assert Line.fit(points).at(1e3) == pytest.approx(1e-3, rel=0.1)
    hiccup = [(4e3, 12e-3), (5e5, 11e-3), (2e6, 27e-3), (8e6, 113e-3)]
    assert Line.fit(hiccup).s_per_byte == pytest.approx(86e-3 / 6e6)
    assert Line.fit(hiccup).residual < 0.1


def test_round_trip(tmp_path: Path) -> None:
    before = profile()
    before.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == before


def _changed(change: Any) -> dict[str, Any]:
    data = copy.deepcopy(profile().to_json())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="other"), "schema 'other'.*gradzip profile"),
        (lambda d: d.update(version=7), "version 7"),
        (lambda d: d.pop("tensors"), "tensors is missing"),
        (lambda d: d.update(tensors=[]), "nothing to plan"),
        (lambda d: d["tensors"][1].update(ready_s=-1), r"tensors\[1\]: ready_s is -1: it cannot be negative"),
        (lambda d: d["tensors"][1].update(name="head"), "'head' twice"),
        (lambda d: d["tensors"][0].update(shape=[0]), "sizes are whole numbers"),
        (lambda d: d["tensors"][0].update(dtype="int7"), "dtype is 'int7'"),
        (lambda d: d.update(forward_s="soon"), "forward_s is 'soon'"),
        (lambda d: d.update(optimizer_s=float("nan")), "finite"),
        (lambda d: d.update(backward_s=0.001), "backward_s.*cannot be below"),
        (lambda d: d.update(hosts=0), "hosts is 0"),
        (lambda d: d.update(transport="pigeon"), "wanted one of host, nccl"),
        (lambda d: d["codecs"].update(gcmop=d["codecs"]["cast"]), "unknown codec 'gcmop', did you mean 'gcomp'"),
        (lambda d: d["codecs"]["cast"].update(ratio=0), "ratio is 0"),
        (lambda d: d["codecs"]["cast"].update(ratios={"hed": 2.0}), "not among the tensors, did you mean 'head'"),
        (lambda d: d["codecs"]["cast"].update(decode={}), "same devices"),
        (lambda d: d["codecs"]["cast"]["encode"]["cpu"].update(points=[]), "nothing was measured"),
        (lambda d: d["collectives"][0].update(kind="arr"), "did you mean 'ar'"),
        (lambda d: d["collectives"][0].update(peers=1), "at least 2"),
        (lambda d: d["links"].update(moon={}), "links has 'moon'"),
        (lambda d: d.update(chunk_s=-1e-3), "chunk_s is -0.001: it cannot be negative"),
        (lambda d: d.update(cores_per_rank=0), "cores_per_rank is 0: it must be above 0"),
        (lambda d: d["codecs"]["cast"]["encode"]["cpu"].pop("frame_s"), "frame_s is missing"),
        (lambda d: d["collectives"][0].update(cpu={"points": [], "frame_s": 0.0}), "cpu: points is empty"),
        (lambda d: d["links"]["inter"].update(bits_per_s=-5), "cannot be negative"),
    ],
)
def test_a_bad_profile_says_what_is_wrong(change: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Profile.from_json(_changed(change))


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the profile"):
        Profile.load(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(PlanError, match="is not JSON"):
        Profile.load(tmp_path / "text.json")
    with pytest.raises(PlanError, match="wanted an object"):
        Profile.from_json([1, 2])


# -- the profiles that ship ------------------------------------------------------------------------------------------

# Parameters and tensors as published: torchvision's and Hugging Face's model cards, and Espresso's Table 4 (sizes in
# MiB there: 528, 170, 2559, 420, 475, 328; it counts 207 tensors for BERT, which has 206 with both heads).
PUBLISHED = {
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "vgg16": (138_357_544, 32),
    "ugatit": (670_761_088, 148),
    "bert-base": (110_106_428, 206),
    "gpt2": (124_439_808, 148),
    "lstm": (85_974_278, 10),
}
MEBIBYTES = {"resnet101": 170, "vgg16": 528, "ugatit": 2559, "bert-base": 420, "gpt2": 475, "lstm": 328}


def test_all_models_ship() -> None:
    assert models.names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shipped_models_have_their_published_sizes(name: str) -> None:
    shipped = models.load(name)
    parameters, tensors = PUBLISHED[name]
    assert sum(t.numel for t in shipped.tensors) == parameters
    assert len(shipped.tensors) == tensors
    if name in MEBIBYTES:
        assert round(shipped.size_bytes / 2**20) == MEBIBYTES[name]
    assert "computed" in shipped.origin["collectives"]


def test_shipped_models_are_as_their_script_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_profiles

    for name in models.names():
        made = json.loads(json.dumps(make_profiles.make(name).to_json()))
        assert models.load(name).to_json() == made, "run python bench/make_profiles.py"


def test_an_unknown_model() -> None:
    with pytest.raises(PlanError, match="did you mean 'resnet50'"):
        models.load("resnet5")
