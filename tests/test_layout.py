"""The shape of the package: imports point down only, `__all__` is true."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import gradzip

PACKAGE = Path(gradzip.__file__).parent

# A module may import from its own package and from lower layers (docs/design.md, CONTRIBUTING.md).
LAYERS = {
    "errors": 0,
    "spans": 0,
    "optim": 1,
    "emulate": 1,
    "jsonfile": 1,
    "option": 1,
    "saved": 1,
    "routes": 1,
    "wire": 1,
    "engines": 2,
    "codecs": 3,
    "sensitivity": 3,
    "feedback": 4,
    "plan": 4,
    "policy": 4,
    "accordion": 5,
    "exchange": 5,
    "planner": 9,
    "hooks": 10,
    "capture": 10,
    "demo": 12,
    "bench": 11,
    "report": 11,
    "integrations": 11,
    "": 12,  # gradzip itself: the public names
    "cli": 13,
    "__main__": 14,
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def test_layers_are_those_of_the_package_and_of_the_contributors_map() -> None:
    assert LAYERS.keys() == {_part(path.relative_to(PACKAGE)) for path in MODULES}
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    lines = page.split("## Layers")[1].split("```")[1].strip().splitlines()
    named = [name for line in lines for name in line.split("  ")[0].split(", ")]
    assert sorted(named) == sorted(LAYERS.keys() - {"", "__main__"})


def test_no_module_escapes_the_tests() -> None:
    assert PACKAGE / "errors.py" in MODULES
    assert PACKAGE / "cli" / "demo.py" in MODULES


def _part(relative: Path) -> str:
    """The layer name of a file: its top-level module or package; '' for gradzip/__init__.py."""
    first = relative.parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def _imported_parts(folder: Path, source: str) -> set[str]:
    """The layer names that a file in that folder imports, at whatever place in it."""
    package = ["gradzip", *folder.relative_to(PACKAGE).parts]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] != "gradzip":
                continue
            part = target[1] if len(target) > 1 else ""
            is_module = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
            found.add(part if part and is_module else "")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = _part(path.relative_to(PACKAGE))
    assert own in LAYERS, f"{own} has no layer yet: give it one in LAYERS, and in CONTRIBUTING.md"
    for part in _imported_parts(path.parent, path.read_text()) - {own}:
        assert LAYERS[part] < LAYERS[own], f"{path.name} is in layer {LAYERS[own]} and imports {part or 'gradzip'}"


def test_every_form_of_import_is_understood() -> None:
    forms = {
        "from ..cli import main": {"cli"},
        "from .. import cli, wire": {"cli", "wire"},
        "import gradzip.cli.demo": {"cli"},
        "from gradzip.cli import main": {"cli"},
        "def f():\n    from ..engines.layout import Floor": {"engines"},
        "from .base import Codec": {"codecs"},
        "from .. import __version__": {""},
        "import torch": set(),
    }
    for source, expected in forms.items():
        assert _imported_parts(PACKAGE / "codecs", source) == expected, source


@pytest.mark.parametrize(
    "path", [p for p in MODULES if "__all__" in p.read_text()], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_all_is_true(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] == "integrations" and importlib.util.find_spec(parts[-1]) is None:
        pytest.skip(f"{parts[-1]} is not installed")
    module = importlib.import_module(".".join(["gradzip", *parts]).removesuffix(".__init__"))
    assert len(module.__all__) == len(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_every_public_name_is_exported() -> None:
    public = {n for n, v in vars(gradzip).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    public -= {"annotations"}
    assert public <= set(gradzip.__all__), f"not in __all__: {sorted(public - set(gradzip.__all__))}"
