"""Every claim of SECURITY.md names a test, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", TEXT)))
ROWS = [
    row.strip("| ").split(" | ") for row in re.findall(r"^\| (?!nobody can).+$", TEXT, re.MULTILINE)
]


@pytest.mark.parametrize(("file", "function"), NAMED)
def test_a_named_test_exists(file: str, function: str) -> None:
    module = ast.parse((ROOT / "tests" / file).read_text())
    defined = {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert function in defined


def test_every_name_of_a_test_is_written_so_that_it_is_checked() -> None:
    assert len(re.findall(r"test_\w+\.py", TEXT)) == len(
        re.findall(r"`\w+/test_\w+\.py::test_\w+`", TEXT)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_claim_has_a_mechanism_and_a_test(row: list[str]) -> None:
    claim, mechanism, tests = row
    assert claim
    assert mechanism
    assert "::test_" in tests


def test_the_page_says_what_is_not_protected_and_how_to_report() -> None:
    assert len(ROWS) > 10
    assert "**What is not protected**" in TEXT
    assert "**Report a weakness** privately" in TEXT
    assert len(TEXT.splitlines()) < 60
