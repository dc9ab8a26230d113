"""The text form of a codec: `parse(str(codec)) == codec`, and messages that help."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradzip import Codec, parse
from gradzip.codecs import REGISTRY as EVERYTHING
from gradzip.errors import PlanError, Unsupported
from gradzip.planner.auto import Auto
from gradzip.policy import as_policy

# Other tests register codecs of their own.
REGISTRY = {name: cls for name, cls in EVERYTHING.items() if cls.__module__.startswith("gradzip.")}

# Options that are words; numbers are drawn by their type.
WORDS: dict[str, list[Any]] = {
    "mode": ["near", "lossless", "keep", "paper"],
    "round": ["nearest", "truncate"],
    "own": ["near", "lossless"],
    "book": ["frame", "shared"],
    "to": ["bf16", "fp16"],
    "norm": ["max", "l2"],
    "feedback": ["auto", "true", "false", "bf16", "cpu"],
    "share": ["1%", "2.5%", "0.0001", 0.3, 0.01, "30%", "0"],
}


def _values(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    kind = str(field.type)
    if field.name in WORDS:
        return st.sampled_from(WORDS[field.name])
    if kind.startswith("bool"):
        return st.booleans()
    if kind.startswith("int"):
        return st.integers(-10, 100_000) | st.integers(0, 9)
    if kind.startswith("float"):
        return st.floats(0, 1, exclude_min=True)
    raise AssertionError(f"say in WORDS what the option {field.name!r} may be")


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    """Any codec with some of its options changed to anything that it accepts."""
    cls = REGISTRY[draw(st.sampled_from(sorted(REGISTRY)))]
    values = {field.name: draw(_values(field)) for field in dataclasses.fields(cls) if draw(st.booleans())}
    try:
        return cls(**values)
    except Unsupported:
        return cls()


@given(codecs())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_text_parses_back(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert str(parse(str(codec))) == str(codec)


@given(codecs())
def test_repr_is_python(codec: Codec) -> None:
    assert eval(repr(codec), {cls.__name__: cls for cls in REGISTRY.values()}) == codec


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_defaults_stay_silent(name: str) -> None:
    assert str(REGISTRY[name]()) == name


def test_a_codec_is_its_own_parse() -> None:
    codec = parse("gcomp:keep=7")
    assert parse(codec) is codec


def test_spaces_do_not_matter() -> None:
    assert parse("  gcomp: keep = 7 , round = truncate ") == parse("gcomp:keep=7,round=truncate")


def test_keep_means_mode_keep() -> None:
    assert parse("gcomp:keep=7") == parse("gcomp:mode=keep,keep=7")
    assert str(parse("gcomp:mode=keep,keep=7")) == "gcomp:keep=7"


def test_feedback_says_where_errors_wait() -> None:
    kept = {"auto": "fp32", "true": "fp32", "false": None, "bf16": "bf16", "cpu": "cpu"}
    assert {f: parse(f"topk:feedback={f}").error_memory for f in kept} == kept
    assert parse("cast").error_memory is parse("gcomp").error_memory is parse("identity").error_memory is None
    assert parse("cast:feedback=true").error_memory == "fp32"
    assert parse("gcomp:ulps=256").error_memory == parse("gcomp:keep=6").error_memory == "fp32"
    topk: Any = type(parse("topk"))
    assert topk(0.3, feedback=False) == parse("topk:ratio=0.3,feedback=false")
    assert str(topk(0.3, feedback=True)) == "topk:ratio=0.3,feedback=true"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gcmop", "unknown codec 'gcmop', did you mean 'gcomp'?"),
        ("powersdg:rank=2", "did you mean 'powersgd'?"),
        ("gcomp:mod=near", "no option 'mod', did you mean 'mode'?"),
        ("gcomp:mode=losless", "did you mean 'lossless'?"),
        ("cast:too=bf16", "did you mean 'to'?"),
        ("identity:level=1", "it has: none"),
        ("quux", "`gradzip codecs` lists them all"),
        ("bf16", "did you mean 'cast:to=bf16'?"),
        ("FP16", "did you mean 'cast:to=fp16'?"),
        ("topk:0.01", "Did you mean 'topk:ratio=0.01'?"),
        ("powersgd:4", "Did you mean 'powersgd:rank=4'?"),
        ("gcomp:lossless", "Did you mean 'gcomp:mode=lossless'?"),
        ("randomk:unbiased", "Did you mean 'randomk:unbiased=true'?"),
    ],
)
def test_near_misses_are_named(text: str, message: str) -> None:
    with pytest.raises(Unsupported) as error:
        parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gcomp:keep",  # no value
        "gcomp:keep=7,keep=8",  # twice
        "gcomp:keep=seven",
        "gcomp:keep=24",
        "gcomp:keep=-1",
        "gcomp:mode=lossless,keep=7",
        "gcomp:ulps=0",
        "gcomp:limit=9",
        "gcomp:book=shared,refresh=2",
        "gcomp:refresh=20",
        "gcomp:round=up",
        "gcomp:book=mine",
        "gcomp:own=keep",
        "gcomp:keep=7,own=lossless",
        "gcomp:mode=lossless,own=near",
        "gcomp:mode=lossless,own=lossless",
        "cast:to=int8",
        "cast:feedback=maybe",
        "gcomp:mode=lossless,feedback=true",
        "identity:feedback=true",
        "zlib:level=10",
        "zstd:level=99",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        parse(text)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("bf16", " Did you mean 'cast:to=bf16'?"),
        ("fp16", " Did you mean 'cast:to=fp16'?"),
        ("gcmop:keep=7", " Did you mean 'gcomp'?"),
        ("quux", ""),
    ],
)
def test_policies_that_are_none_get_a_hint(policy: str, hint: str) -> None:
    with pytest.raises(Unsupported) as error:
        as_policy(policy)
    assert str(error.value) == (
        f"{policy!r} is not a policy.{hint} A policy is a codec such as 'topk:ratio=0.01', a Plan, or an object with "
        "option(name, shape)"
    )


@pytest.mark.parametrize(
    ("text", "hint"), [("auto:lossy", "'auto:lossy=true'"), ("auto:codecs", "'auto:codecs=gcomp,powersgd'")]
)
def test_auto_without_a_value_gets_a_hint(text: str, hint: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"Did you mean {hint}?")):
        Auto.parse(text)
