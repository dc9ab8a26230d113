"""Profiles of well-known models, for planning without a cluster. bench/make_profiles.py makes them."""

from __future__ import annotations

from pathlib import Path

from ...errors import PlanError, nearest
from ..profile import Profile

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Profile:
    """The profile that ships for a model."""
    if name not in names():
        raise PlanError(f"no profile ships for {name!r}{nearest(name, names())}; there are {', '.join(names())}")
    return Profile.load(FOLDER / f"{name}.json")
