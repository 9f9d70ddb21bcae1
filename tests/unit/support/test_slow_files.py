"""Files without slow tests are known by their text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.campaigns.slow_files import can_have_slow_tests


@pytest.mark.parametrize("text", ["@pytest.mark.slow\n", "SLOW = kit.SLOW\n", "pytestmark = campaign(expected_s=9)\n"])
def test_a_file_that_names_a_marker_is_looked_into(text: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    assert can_have_slow_tests(tmp_path / "test_one.py", tmp_path)
    assert not can_have_slow_tests(tmp_path / "test_other.py", tmp_path)


def test_a_conftest_that_names_a_marker_speaks_for_the_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "marked" / "below").mkdir(parents=True)
    (tmp_path / "marked" / "conftest.py").write_text("MARKS = [pytest.mark.slow]\n")
    assert can_have_slow_tests(tmp_path / "marked" / "below" / "test_one.py", tmp_path)
    (tmp_path / "conftest.py").write_text("# slow\n")
    assert not can_have_slow_tests(tmp_path / "other" / "test_one.py", tmp_path), "the root's speaks for nobody"
