"""The text form of an Option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradzip import Option, option
from gradzip.errors import Unsupported

TEXTS = [
    "gcomp",
    "powersgd:rank=2",
    "powersgd:rank=2@gpu",
    "powersgd:rank=2@gpu/alltoall",
    "gcomp:mode=lossless,limit=7/allgather",
    "topk:ratio=0.01@cpu/rs.intra > enc.gpu > a2a.inter",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(text: str) -> None:
    assert str(Option.parse(text)) == text


def test_parts() -> None:
    assert Option.parse("powersgd:rank=2@gpu/alltoall") == Option("powersgd:rank=2", "gpu", "alltoall")
    assert Option.parse("gcomp") == Option("gcomp", None, None)
    assert Option.parse(" topk : ratio = 0.01 @ cpu / a>b ") == Option("topk:ratio=0.01", "cpu", "a > b")
    known = Option("gcomp")
    assert Option.parse(known) is known


words = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
codecs = st.one_of(words, st.builds("{}:{}={}".format, words, words, st.integers()))
routes = st.lists(words, min_size=1, max_size=4).map(" > ".join)


@given(codecs, st.sampled_from([None, *option.DEVICES]), st.none() | routes)
def test_every_option_survives_its_text(codec: str, device: str | None, route: str | None) -> None:
    made = Option(codec, device, route)
    assert Option.parse(str(made)) == made


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gcomp@gpo", "unknown device 'gpo', did you mean 'gpu'"),
        ("gcomp@tpu9/ring", "unknown device 'tpu9'"),
        ("gcomp@", "unknown device ''"),
        ("", "cannot read the codec ''"),
        ("@gpu", "cannot read the codec ''"),
        ("gcomp:", "cannot read the codec 'gcomp:'"),
        ("gcomp/", "cannot read the route ''"),
        ("gcomp/a > ", "cannot read the route 'a > '"),
        ("gcomp/ring/ring", "cannot read the route 'ring/ring'"),
        ("gcomp/ring@gpu", "cannot read the route 'ring@gpu'"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Option.parse(text)
    assert complaint in str(caught.value)


def test_it_needs_no_tensor_code() -> None:
    """Plans are read on machines without torch: option.py and errors.py load alone."""
    folder = Path(option.__file__).parent
    code = (
        "import sys, types\n"
        "package = types.ModuleType('gradzip'); package.__path__ = [sys.argv[1]]; sys.modules['gradzip'] = package\n"
        "from gradzip.option import Option\n"
        "assert str(Option.parse('gcomp@gpu')) == 'gcomp@gpu'\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'tensor code was loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
