"""ARCHITECTURE.md is true: its modules exist, its map is complete, imports go down the map."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bridge", "consumer_sdk", "spark_consumer")
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PATH = re.compile(rf"`((?:{'|'.join(PACKAGES)})/[\w/.]*)`")
WALKS = (
    "A WAL byte to JetStream",
    "A snapshot request to its meta",
    "An event into SQLite",
    "An event into the lake",
)


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    start = re.search(rf"^#+ {re.escape(heading)}$", TEXT, re.MULTILINE)
    assert start is not None, f"ARCHITECTURE.md has no heading {heading!r}"
    return re.split(r"^#+ ", TEXT[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def layers_of(package: str) -> list[set[str]]:
    """The map of a package, top first; what stands on one line shares a layer."""
    lines = [line for line in section(f"`{package}`").splitlines() if line.startswith("- ")]
    layers = []
    for line in lines:
        named, _, _ = line.partition(":")
        layers.append(
            {path.removeprefix(f"{package}/").removesuffix("/") for path in PATH.findall(named)}
        )
    return [{name.removesuffix(".py") for name in layer} for layer in layers]


def contract_of(package: str) -> list[set[str]]:
    """The layers that import-linter holds."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and contract["containers"] == [package]:
            return [{name.strip() for name in layer.split("|")} for layer in contract["layers"]]
    raise AssertionError(f"pyproject.toml has no layers for {package}")


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, with the names taken from packages."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def upward(layers: list[set[str]], importer: str, imported: str) -> bool:
    """Whether one part of a package imports another from above it, or from beside it."""
    rank = {name: number for number, layer in enumerate(layers) for name in layer}
    if importer == imported or not {importer, imported} <= rank.keys():
        return False
    return rank[imported] <= rank[importer]


def test_every_module_it_names_exists() -> None:
    named = sorted(set(PATH.findall(TEXT)))
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_is_on_the_map(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert folders - set().union(*layers_of(package)) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_is_what_import_linter_holds(package: str) -> None:
    assert layers_of(package) == contract_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_down_the_map(package: str) -> None:
    layers = layers_of(package)
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        importer = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            if top == package and rest and upward(layers, importer, rest.partition(".")[0]):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_an_import_upwards_or_sideways_would_be_noticed() -> None:
    layers = [{"top"}, {"left", "right"}, {"bottom"}]
    assert upward(layers, "bottom", "top")
    assert upward(layers, "left", "right")
    assert not upward(layers, "top", "bottom")
    assert not upward(layers, "left", "left")


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_names_modules_in_order(walk: str) -> None:
    steps = re.findall(r"^\d+\. (.*)", section(walk), re.MULTILINE)
    assert len(steps) >= 4
    for step in steps:
        assert re.search(r"`\w+/[\w/]+\.py`", step), f"names no module: {step}"
