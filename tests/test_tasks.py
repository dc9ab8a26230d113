"""experiments/tasks: it runs, its page follows its results, and what must end inside the margin does."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "experiments/tasks"


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The experiment's script, under a name that no other experiment has."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("tasks_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "tasks_run", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["momentum", "adamw"])
def test_a_few_steps_of_each_kind_of_codec(tasks: ModuleType, task: str) -> None:
    plain = tasks.run(task, "identity", 0, steps=4)
    for codec in ("gcomp", "gcomp:mode=lossless", "gcomp:mode=paper", "powersgd:rank=2", "accordion", "sign", "dgc"):
        result = tasks.run(task, codec, 0, steps=4)
        assert math.isfinite(result.loss)
        assert result.bits < plain.bits
        if codec == "gcomp:mode=lossless":
            assert result.loss == plain.loss


def test_the_page_follows_the_results(tasks: ModuleType) -> None:
    readme = (FOLDER / "README.md").read_text()
    assert "<!-- table momentum -->" in readme
    assert tasks.task_tables.filled(readme) == readme, "run python experiments/tasks/task_tables.py"


def test_what_must_end_within_the_margin_does(tasks: ModuleType) -> None:
    rows = tasks.task_tables.read()
    assert len(tasks.task_tables.losses(rows, "momentum", "identity")) == tasks.SEEDS
    for codec in tasks.MUST:
        assert tasks.task_tables.distance(rows, "momentum", codec) <= tasks.task_tables.MARGIN, codec
