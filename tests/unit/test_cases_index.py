"""`tests/cases.md` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_index_names_is_there() -> None:
    named = re.findall(r"`([a-z0-9_]+/(?:[a-z0-9_]+\.py)?)(?:::([a-z0-9_]+))?", (TESTS / "cases.md").read_text())
    assert len(named) > 40
    missing = [name for name, _ in named if not (TESTS / name).exists()]
    unknown = [test for name, test in named if test and f"def {test}(" not in (TESTS / name).read_text()]
    assert missing + unknown == []
