"""The documentation as a whole: pages that can be found, tables made from tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gradzip

ROOT = Path(__file__).parent.parent
PACKAGE = Path(gradzip.__file__).parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_page_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert sorted(re.findall(r"([\w-]+\.md)", navigation)) == [page.name for page in PAGES]


@pytest.mark.parametrize("name", ["how-it-works.md", "new-codec.md"])
def test_files_and_names_of_the_code_that_pages_speak_of_exist(name: str) -> None:
    sources = [path for folder in (PACKAGE, ROOT / "native", ROOT / "tests") for path in folder.rglob("*.*")]
    code = "\n".join(path.read_text() for path in sources if path.suffix == ".py")
    spoken_of = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / name).read_text())
    files = {text for text in spoken_of if re.fullmatch(r"[\w/]+\.(py|cuh|cpp)", text)}
    assert len(files) > 8
    assert [text for text in files if not any(f"/{path.as_posix()}".endswith(f"/{text}") for path in sources)] == []
    names = {
        word for text in {*spoken_of} - files for word in text.split(".") if re.fullmatch(r"[A-Z]\w+|\w*_\w+", word)
    }
    assert len(names) > 8
    assert [word for word in names if not re.search(rf"\b{word}\b", code)] == []


def test_examples_of_the_readme_and_quick_start_name_real_things() -> None:
    """Every `gradzip.name` in them exists."""
    for page in (ROOT / "README.md", ROOT / "docs/quickstart.md"):
        for name in set(re.findall(r"\bgradzip\.([a-z_]+|[A-Z]\w+)\b(?!\.(?:md|html|json))", page.read_text())):
            if name not in ("html", "md"):
                assert hasattr(gradzip, name) or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists(), name


def test_the_compatibility_page_is_made_from_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import make_compatibility

    assert make_compatibility.PAGE.read_text() == make_compatibility.page(), "run python bench/make_compatibility.py"
    assert make_compatibility.page().count("| ✓") == 7 * 7, "every feature alone, and with every other"


def test_what_the_compatibility_table_names_is_tested() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[(.+?)\])?`", (ROOT / "docs/compatibility.md").read_text())
    assert len(named) > 20
    for name, function, case in named:
        source = (ROOT / "tests" / name).read_text()
        functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{name} has no {function}"
        assert not case or f'"{case}"' in source, f"{name} has no case {case!r}"
