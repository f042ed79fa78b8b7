"""The last act of `bridge demo`: the tables in a lake, read back by two engines."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_reads_the_lake_back_as_the_source_has_it(demo):
    running = demo("--seconds", "5")
    assert running.ended(580) == 0, running.text
    heading, *rows = running.text[running.text.index(" rows / sum") :].splitlines()[:7]
    assert heading.split()[-4:] == ["PostgreSQL", "Spark", "SQL", "DuckDB"]
    for row in rows:
        name, *cells = row.split()
        readings = [" ".join(cells[start : start + 3]) for start in (0, 3, 6)]
        assert len(set(readings)) == 1, row
        assert name == "visits" or not readings[0].startswith("0 "), row
    assert "Everything agrees." in running.text
    assert running.leftovers() == []
