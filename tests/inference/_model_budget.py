"""The least memory that a model streams with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Any]


def weights_of(model: Any) -> int:
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


def least(make: Make, directory: Path, **options: Any) -> int:
    """The smallest budget that is enough."""
    with pytest.raises(ValueError, match="is too small") as refused:
        make(directory, resident_bytes=1, **options)
    return int(str(refused.value).split()[-2])
