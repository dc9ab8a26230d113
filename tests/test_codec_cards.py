"""docs/codecs.md has a card for every codec, and what the cards say of sizes and sums is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gradzip import parse
from gradzip.codecs import REGISTRY

PAGE = (Path(__file__).parent.parent / "docs/codecs.md").read_text()
OURS = sorted(name for name, cls in REGISTRY.items() if cls.__module__.startswith("gradzip."))


def card(name: str) -> dict[str, str]:
    """The lines of a codec's card by their first word."""
    text = re.split(r"^#+ ", PAGE.split(f"\n## {name}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^- \*\*(\w+)\*\* (.+)$", text, re.MULTILINE))


def test_there_is_a_card_for_every_codec_and_for_nothing_else() -> None:
    assert sorted(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)) == OURS


@pytest.mark.parametrize("name", OURS)
def test_cards_say_what_is_true(name: str) -> None:
    lines, codec = card(name), parse(name)
    assert {"Sends", "Error", "Cost", "Summable"} <= set(lines)
    assert lines["Summable"].startswith("yes" if codec.summable else "its factors" if codec.rounds > 1 else "no")
    assert lines["Error"].startswith("biased") == codec.biased
    if codec.lossless:
        assert lines["Error"].startswith("none")
    for option in re.findall(r"`(\w+)=", lines["Sends"] + lines["Error"]):
        assert hasattr(codec, option), f"{name} has no option {option}"


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        *(("topk:ratio=0.01", 0.41), ("dgc:ratio=0.001", 0.044), ("threshold", 33), ("randomk:ratio=0.01", 0.32)),
        *(("sign", 1), ("onebit", 1), ("terngrad", 1.6), ("qsgd:bits=8", 8 + 32 / 512), ("natural", 8), ("cast", 16)),
        *(("int8", 8.13), ("int4", 4.5), ("int4:block=128", 4.13), ("fp8", 8.13)),
    ],
)
def test_costs(spec: str, bits: float) -> None:
    assert 8 * parse(spec).bound(1 << 22, torch.float32) / (1 << 22) == pytest.approx(bits, rel=0.02)
