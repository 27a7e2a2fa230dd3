"""Imports point one way: read from the source, so that an import inside a function counts too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import titanlite

ROOT = Path(titanlite.__file__).parent

# A unit (a module or folder right under titanlite/) may import units of its own row and of rows above it in this list.
ROWS = [
    {"__init__", "utils", "config", "config_file", "torchtitan", "convert", "launch", "batch"},
    {"models", "parallel"},
    {"data", "losses", "optim", "checkpoint", "resilience", "observe", "validate"},
    {"trainer", "run_folder"},
    {"resume"},
    {"train", "generate", "huggingface", "rl", "planner", "verify"},  # never one another
    {"cli"},
]
ENTRIES = ROWS[-2]
ROW_OF = {unit: number for number, row in enumerate(ROWS) for unit in row}
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def unit_of(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide where they point"
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inside or {node.module}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports_of(path) if name.split(".")[0] == "titanlite"}


def test_every_unit_has_a_row():
    assert {unit_of(module) for module in MODULES} <= ROW_OF.keys()


@pytest.mark.parametrize("module", MODULES)
def test_no_import_points_up(module):
    row = ROW_OF[unit_of(module)]
    assert {name for name in ours(MODULES[module]) if ROW_OF[unit_of(name)] > row} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) in ENTRIES])
def test_entries_do_not_import_one_another(module):
    assert {name for name in ours(MODULES[module]) if unit_of(name) in ENTRIES - {unit_of(module)}} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) == "parallel"])
def test_nothing_in_parallel_knows_a_model(module):
    assert {name for name in ours(MODULES[module]) if unit_of(name) == "models"} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.endswith((".model", ".layers", ".moe", ".decoder", ".lightning"))])
def test_model_files_import_torch_and_each_other_only(module):
    """torch without its distributed part, and the standard library."""
    assert {name for name in ours(MODULES[module]) if not name.startswith("titanlite.models.")} == set()
    others = imports_of(MODULES[module]) - ours(MODULES[module])
    assert {name for name in others if "distributed" in name} == set()
    assert {name.split(".")[0] for name in others} <= {"torch", "math", "dataclasses", "typing", "collections"}


@pytest.mark.parametrize("module", [m for m in MODULES if unit_of(m) == "models" and m.endswith(".plans")])
def test_plans_import_their_vocabulary_and_sizes_only(module):
    assert imports_of(MODULES[module]) <= {"titanlite.parallel.plan", "titanlite.models.decoder"}


def test_no_modules_import_each_other_in_a_circle():
    TopologicalSorter({module: ours(path) - {module} for module, path in MODULES.items()}).prepare()  # raises CycleError
