"""Stages that start an engine, killed at random points: nothing of what it answered, computed or measured is lost or doubled."""

from pathlib import Path

import pytest

from tests.recipes.test_faults import break_it

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("stage", ["prepare", "precompute", "validate"])
def test_kill_9_while_an_engine_is_at_work(tmp_path: Path, stage: str) -> None:
    assert break_it(tmp_path, stage, "kill", 4, "--engine")["points"] == 4
