"""The cache of compiled kernels: only what this user alone could have written is loaded."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from gradzip.engines.cuda import driver, kernel_cache
from gradzip.errors import GradzipWarning

COMPILED = b"compiled"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "_compile", lambda text, architecture: COMPILED)
    kernel_cache._warn_once.cache_clear()
    return tmp_path / "gradzip" / "kernels"


def fetch() -> bytes:
    return driver._binary("pack", 128, 1, "sm_90")


def kept(place: Path, content: bytes = b"from the cache") -> Path:
    """The file of the kernel, with something in it that tells it from a fresh one."""
    fetch()
    (file,) = place.iterdir()
    file.write_bytes(content)
    return file


def test_folders_and_files_are_for_the_user_alone(place: Path) -> None:
    old = os.umask(0)
    try:
        file = kept(place)
    finally:
        os.umask(old)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (place.parent, place, file)] == [0o700, 0o700, 0o600]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fetch() == b"from the cache"


@pytest.mark.parametrize("which", ["file", "kernels", "gradzip"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_not_loaded(place: Path, which: str, mode: int) -> None:
    file = kept(place)
    part = {"file": file, "kernels": place, "gradzip": place.parent}[which]
    part.chmod(part.stat().st_mode | mode)
    with pytest.warns(
        GradzipWarning, match=f"{part} can be written by others .*compiles its kernels anew.*rm"
    ) as caught:
        assert fetch() == COMPILED
    assert len(caught) == 1
    assert which == "file" or file.read_bytes() == b"from the cache", "it must not be written either"


def test_what_belongs_to_others_is_not_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(place)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(GradzipWarning, match=rf"belongs to user {owner}, not to you \({owner + 1}\)"):
        assert fetch() == COMPILED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_others_in_an_own_folder_is_not_loaded(place: Path) -> None:
    file = kept(place)
    os.chown(file, 12345, -1)
    with pytest.warns(GradzipWarning, match="belongs to user 12345"):
        assert fetch() == COMPILED


def test_links_are_not_followed(place: Path, tmp_path: Path) -> None:
    file = kept(place)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"planted")
    file.unlink()
    file.symlink_to(elsewhere)
    assert kernel_cache.read(file.name) is None
    file.unlink()
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    with pytest.warns(GradzipWarning, match="is a link"):
        assert fetch() == COMPILED
