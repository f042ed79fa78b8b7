"""What import-linter cannot say: the wire package needs almost nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import consumer_sdk.wire

ALLOWED = {"msgpack", "msgspec", "zstandard"}
IMPURE = {"asyncio", "http", "os", "pathlib", "select", "socket", "ssl", "subprocess"}


def imported_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return names


def is_pure(name: str) -> bool:
    top = name.partition(".")[0]
    if top == "consumer_sdk":
        return f"{name}.".startswith("consumer_sdk.wire.")
    return top in ALLOWED or (top in sys.stdlib_module_names and top not in IMPURE)


def test_the_wire_package_imports_nothing_but_itself_and_the_encoders() -> None:
    modules = sorted(Path(str(consumer_sdk.wire.__file__)).parent.rglob("*.py"))
    assert len(modules) > 5
    impure = {
        module.name: names
        for module in modules
        if (names := sorted(n for n in imported_names(module.read_text()) if not is_pure(n)))
    }
    assert impure == {}


def test_the_rule_would_notice() -> None:
    source = "import socket\nfrom consumer_sdk import client\nfrom consumer_sdk.wires import x\n"
    assert [name for name in sorted(imported_names(source)) if not is_pure(name)] == [
        "consumer_sdk",
        "consumer_sdk.wires",
        "socket",
    ]
