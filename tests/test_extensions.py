"""A killed run of the tests does not keep the next one waiting."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import extensions
import pytest

pytestmark = pytest.mark.skipif(
    sys.prefix == sys.base_prefix, reason="the tests run without an environment of their own"
)


def test_who_comes_first_removes_dead_locks(tmp_path: Path) -> None:
    """And nobody else: what is there while others are is theirs."""
    directory = tmp_path / "torch-extensions"
    lock = directory / "py311_cpu" / "an_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    before = os.environ.get(extensions.VARIABLE)
    with extensions.kept_with_environment(directory):
        assert os.environ[extensions.VARIABLE] == str(directory)
        assert not lock.exists()
        lock.touch()
        with extensions.kept_with_environment(directory):
            assert lock.exists()
    assert os.environ.get(extensions.VARIABLE) == before
