"""JSON files with every field damaged: what reads them gives a GradzipError that names the file, or a result."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import profile
from recorded_run import record

from gradzip import GradzipError, Option, Plan, Unsupported, report
from gradzip.planner import models
from gradzip.planner.profile import Profile
from gradzip.report.measured import measured

JUNK: list[Any] = [
    *(None, True, False, 0, -1, 7, 1.5, -2.5, 1e308, -1e308, 5e-324, 10**400, -(10**400), 2**63, 1e-320),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "7", "\x00", "gcomp", "a" * 5000, "topk:ratio=nan"),
    *([], {}, [[]], [None], [1, "x"], {"": {}}, {"x": [1, {"y": None}]}, [1e308] * 3, {"schema": 1}),
]

Node = dict[str, Any] | list[Any]


def nodes(data: Any) -> Iterator[tuple[Node, Any]]:
    """Every place in a document, as a container and a key."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from nodes(data[key])


def trace() -> dict[str, Any]:
    def event(name: str, ts: float, tid: int) -> dict[str, Any]:
        return {"ph": "X", "name": name, "ts": ts, "dur": 10.0, "tid": tid}

    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            event("autograd::engine::evaluate_function: AddmmBackward0", 1.0, 1),
            event("gradzip: exchange bucket 0 at step 3", 5.0, 1),
            event("gradzip: wire bucket 0 at step 3", 6.0, 2),
            event("gradzip: code bucket 0 at step 3", 7.0, 2),
        ]
    }


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A document of each kind, as the project writes them."""
    lines = record(tmp_path_factory.mktemp("run") / "run.jsonl").read_text().splitlines()
    options = {"a.weight": Option("topk:ratio=0.01"), "b.weight": Option("identity")}
    spans = [("compute", "a", 0.0, 0.5), ("inter.out", "b", 0.1, 0.7)]
    expected = {"step_s": 0.1, "plain_s": 0.2, "uncertainty": 0.1}
    plan = Plan(options, {"a.weight": (40, 30), "b.weight": (5,)}, "net", 25.0, expected, spans)
    return {
        "profile": profile().to_json(),
        "plan": plan.to_json(),
        "run": [json.loads(line) for line in lines[:2] + lines[-4:]],
        "trace": trace(),
    }


def read_run(path: Path) -> None:
    runs = report.read([path])
    assert report.page(runs).startswith("<!doctype html>")


READERS: dict[str, Callable[[Path], Any]] = {
    "profile": Profile.load,
    "plan": Plan.load,
    "run": read_run,
    "trace": measured,
}


def write(path: Path, kind: str, data: Any) -> Path:
    text = "\n".join(map(json.dumps, data)) if kind == "run" and isinstance(data, list) else json.dumps(data)
    path.write_text(text)
    return path


def read_or_refuse(kind: str, path: Path) -> str | None:
    """The refusal, which must name the file; anything but a GradzipError fails the test."""
    text = None
    try:
        READERS[kind](path)
    except GradzipError as error:
        text = str(error)
    assert text is None or str(path) in text, f"{text} does not name the file"
    assert text is None or len(text) < 2000, "an error that shows all of a huge value helps nobody"
    return text


@pytest.mark.parametrize("kind", READERS)
def test_intact_files_are_read(kind: str, samples: dict[str, Any], tmp_path: Path) -> None:
    assert read_or_refuse(kind, write(tmp_path / kind, kind, samples[kind])) is None


@pytest.mark.parametrize("kind", READERS)
def test_each_field_of_a_wrong_type(kind: str, samples: dict[str, Any], tmp_path: Path) -> None:
    path, refused, data = tmp_path / kind, 0, copy.deepcopy(samples[kind])
    for number, (container, key) in enumerate(list(nodes(data))):
        right = container[key]
        for junk in JUNK[number % 4 :: 4] if kind in ("profile", "run") else JUNK:  # these have many fields alike
            container[key] = junk
            text = read_or_refuse(kind, write(path, kind, data))
            refused += text is not None
            if text is not None and isinstance(key, str) and kind in ("profile", "plan") and container is data:
                named = key in text or key in ("schema", "version") or (kind, key) == ("profile", "tensors")
                assert named, f"{key} = {junk!r}: {text}"
        container[key] = right
    assert refused


@pytest.mark.parametrize("kind", READERS)
def test_each_field_missing(kind: str, samples: dict[str, Any], tmp_path: Path) -> None:
    for number, _ in enumerate(nodes(samples[kind])):
        data = copy.deepcopy(samples[kind])
        container, key = list(nodes(data))[number]
        del container[key]
        read_or_refuse(kind, write(tmp_path / kind, kind, data))


@pytest.mark.parametrize("kind", READERS)
def test_truncated_files(kind: str, samples: dict[str, Any], tmp_path: Path) -> None:
    whole = write(tmp_path / kind, kind, samples[kind]).read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 200)):
        (tmp_path / kind).write_bytes(whole[:size])
        read_or_refuse(kind, tmp_path / kind)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "\xff\xfe", "9" * 10_000, "NaN", "null", "[]", "{}", '"x"', "[[[1]]]"]
)
def test_other_files(kind: str, text: str, tmp_path: Path) -> None:
    (tmp_path / kind).write_bytes(text.encode("latin-1"))
    assert read_or_refuse(kind, tmp_path / kind) is not None


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage(kind: str, samples: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    document = copy.deepcopy(samples[kind])
    junk = st.one_of(
        st.sampled_from(JUNK),
        st.integers(),
        st.floats(),
        st.text(max_size=10),
        st.recursive(
            st.none() | st.booleans() | st.floats(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=6,
        ),
    )
    for _ in range(data.draw(st.integers(1, 4))):
        container, key = data.draw(st.sampled_from(list(nodes(document))))
        container[key] = copy.deepcopy(data.draw(junk))
    read_or_refuse(kind, write(tmp_path / kind, kind, document))


def test_shipped_profiles_with_one_field_damaged(tmp_path: Path) -> None:
    """Larger and with all that a measured one holds; a few fields of each kind."""
    data = models.load("resnet50").to_json()
    places = list(nodes(data))
    for container, key in places[:: max(1, len(places) // 60)]:
        right = container[key]
        for junk in (None, "x", -1, 10**400, float("nan"), [], {}):
            container[key] = junk
            read_or_refuse("profile", write(tmp_path / "profile", "profile", data))
        container[key] = right


@pytest.mark.parametrize("junk", [None, 7, 1.5, [], {}, b"topk"])
def test_an_option_of_another_type_is_refused(junk: Any) -> None:
    with pytest.raises(Unsupported, match="is not an option"):
        Option.parse(junk)
