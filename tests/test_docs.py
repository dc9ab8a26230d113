"""What the documentation shows is what the code does: examples and tables that are made by scripts are up to date."""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from gradzip import cli, engines
from gradzip.codecs import prior
from gradzip.codecs.prior import PRIOR_LENGTHS
from gradzip.engines import huffman

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the scripts of bench/ importable."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return ROOT / "bench"


def test_worked_example_shows_what_the_codec_writes(bench: Path) -> None:
    import hexdump

    assert hexdump.example() in (ROOT / "docs/format.md").read_text(), "run python bench/hexdump.py"


def test_worked_example_decodes(bench: Path) -> None:
    import hexdump

    payload = torch.frombuffer(bytearray(hexdump.frame()), dtype=torch.uint8)
    floors = torch.full((hexdump.VALUES,), hexdump.FLOOR, dtype=torch.int8)
    with engines.use("reference"):
        decoded = gradzip.decode(payload, floor=floors)
    assert torch.equal(decoded, (hexdump.gradient() * 64).round() / 64)


def test_prior_book_is_as_its_script_writes_it(bench: Path) -> None:
    import make_prior

    lengths = np.array(PRIOR_LENGTHS, np.uint8)
    assert make_prior.text(lengths) == Path(prior.__file__).read_text()  # the installed one: tests also run on a wheel
    assert huffman.escape_length(lengths) == huffman.MAX_LENGTH


def test_tables_of_the_exponent_experiment_are_those_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "experiments/exponents"
    monkeypatch.syspath_prepend(str(folder))
    import tables

    assert Path(tables.__file__).parent == folder
    readme = (folder / "README.md").read_text()
    assert tables.filled(readme) == readme, "run python experiments/exponents/tables.py"


def test_benchmark_page_follows_its_csv(bench: Path) -> None:
    import make_tables

    assert make_tables.PAGE.read_text() == make_tables.page(), "run python bench/make_tables.py"


def test_the_readme_has_the_table_of_its_script(bench: Path) -> None:
    import make_readme

    readme = make_readme.README.read_text()
    assert make_readme.filled(readme) == readme, "run python bench/make_readme.py"
    assert make_readme.table().count("**") == 2 * 10, "every row has its figure"


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 750


def test_what_is_said_of_sizes_and_errors_is_measured() -> None:
    """keep=7 has BF16's error at two thirds of its bytes; near mode sends about half."""
    rows = {row["codec"]: row for row in reversed(_rows("bench/results/cpu_codec.csv"))}
    for error in ("max_error", "l2_error"):
        assert float(rows["gcomp:keep=7"][error]) <= float(rows["cast"][error])
    assert float(rows["gcomp:keep=7"]["bits"]) / float(rows["cast"]["bits"]) == pytest.approx(2 / 3, abs=0.02)
    training = [float(row["ratio"]) for row in _rows("bench/results/own.csv") if row["codec"] == "gcomp"]
    assert len(training) == 2
    assert all(1.75 < ratio < 2.3 for ratio in training)


def _rows(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_tree_of_the_readme_is_that_of_the_package() -> None:
    (tree,) = [block.text for block in blocks(ROOT / "README.md") if block.text.startswith("src/gradzip/")]
    lines = [line.split()[0] for line in tree.splitlines()[1:]]
    assert len(tree.splitlines()) <= 10
    for name in lines:
        assert (ROOT / name).is_dir() or (ROOT / "src/gradzip" / name).is_dir(), name


def test_the_picture_of_the_readme_is_that_of_a_run(bench: Path) -> None:
    import demo_picture

    result = json.loads(demo_picture.RESULT.read_text())
    assert demo_picture.PICTURE.read_text() == demo_picture.picture(result), "run python bench/demo_picture.py"
    assert {row["replicas"] for row in result["rows"]} == {"identical"}


# -- links and code blocks ------------------------------------------------------------------------------------------

PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
    | set((ROOT / "docs").glob("*.md"))
    | {page for page in (ROOT / "experiments").rglob("*.md") if page.parent.name != "notes"}  # parts of docs/results.md
)
RUNNABLE = "<!-- runnable -->"


@dataclass(frozen=True)
class Block:
    """Text between two fences."""

    language: str
    text: str
    line: int
    runnable: bool


def blocks(page: Path) -> list[Block]:
    return _split(page.read_text())[1]


def _split(text: str) -> tuple[str, list[Block]]:
    """A page's prose, and its code blocks."""
    prose: list[str] = []
    found: list[Block] = []
    opened: tuple[str, int, bool] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and opened is None:
            opened, inside = (fence[1], number, bool(prose) and prose[-1] == RUNNABLE), []
        elif fence and opened is not None:
            language, begin, runnable = opened
            found.append(Block(language, textwrap.dedent("\n".join(inside)), begin, runnable))
            opened = None
        else:
            (prose if opened is None else inside).append(line)
    assert opened is None, f"the code block of line {opened and opened[1]} does not end"
    return "\n".join(prose), found


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", _split(page.read_text())[0], re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain} | set(re.findall(r'id="([^"]+)"', page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", _split(page.read_text())[0])
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target}: there is no {goal}"
        if anchor:
            assert anchor in _anchors(goal), f"{target}: {goal.name} has no such heading"


PYTHON = [(page, block) for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda x: _name(x) if isinstance(x, Path) else str(x.line))
def test_python_blocks_compile(page: Path, block: Block) -> None:
    compile(block.text.replace("…", "..."), f"{_name(page)}, line {block.line}", "exec")


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda x: _name(x) if isinstance(x, Path) else str(x.line))
def test_names_that_are_imported_from_gradzip_exist(page: Path, block: Block) -> None:
    for node in ast.walk(ast.parse(block.text.replace("…", "..."))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gradzip"):
            continue
        if (node.module or "").startswith("gradzip.integrations."):
            pytest.importorskip((node.module or "").rpartition(".")[2])  # the package that it is for
        module = importlib.import_module(node.module or "")
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


SCRIPTS = [(page, block) for page, block in PYTHON if block.runnable]


@pytest.mark.parametrize(("page", "block"), SCRIPTS, ids=lambda x: _name(x) if isinstance(x, Path) else str(x.line))
def test_runnable_blocks_run(page: Path, block: Block, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block.text)
    several = "init_process_group" in block.text
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if several else []
    source = str(Path(gradzip.__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_quick_start_has_a_script_that_runs() -> None:
    assert [_name(page) for page, _ in SCRIPTS] == ["docs/quickstart.md"] * 2


def _commands(page: Path) -> list[str]:
    """Everything on a page that someone may type: lines of shell blocks, and code inside sentences."""
    prose, found = _split(page.read_text())
    shell = [block.text.replace("\\\n", " ") for block in found if block.language in ("", "bash", "sh")]
    lines = [line.partition(" # ")[0] for text in shell for line in text.splitlines()]
    sentences = re.sub(r"^#.*$", "", prose, flags=re.MULTILINE)  # headings may be error messages
    inline = [text for text in re.findall(r"`([^`\n]+)`", sentences) if re.match(r"(gradzip|make) ", text)]
    return [*lines, *inline]


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """That of the command which these words begin with."""
    parser = cli.parser()
    for word in words:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not inner or not re.fullmatch(r"[a-z]+", word):
            break
        assert word in inner[0].choices, f"there is no command {word!r} of {parser.prog}"
        parser = inner[0].choices[word]
    return parser


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_exist(page: Path) -> None:
    """make's targets, gradzip's commands and their options."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in _commands(page):
        for part in re.split(r"\s--\s|[;&|]{1,2}\s", line):
            words = part.replace("[", " ").replace("]", " ").split()
            while words and re.fullmatch(r"\w+=\S*", words[0]):  # environment variables
                words = words[1:]
            if words[:1] == ["make"] and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
                assert words[1] in targets, f"{line!r}: the Makefile has no target {words[1]}"
            if "gradzip" in words and (words[0] == "gradzip" or words[words.index("gradzip") - 1] == "-m"):
                own = words[words.index("gradzip") + 1 :]
                known = _parser(own)._option_string_actions
                for option in (word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)):
                    assert option in known, f"{line!r}: {_parser(own).prog} has no option {option}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a](missing.md)", "there is no"),
        ("[a](#no-such-heading)", "has no such heading"),
        ("```\nmake nonsense\n```", "no target nonsense"),
        ("`gradzip nonsense`", "no command 'nonsense'"),
        ("```bash\nA=1 gradzip plan x.json --nonsense 3\n```", "no option --nonsense"),
        ("```\ntorchrun x -- gradzip bench net --nonsense\n```", "no option --nonsense"),
    ],
)
def test_a_mistake_on_a_page_is_found(text: str, complaint: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n{text}\n")
    check = test_links_lead_somewhere if "](" in text else test_commands_exist
    with pytest.raises(AssertionError, match=complaint):
        check(page)
