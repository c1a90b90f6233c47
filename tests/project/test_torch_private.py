"""What torch does not document is named in one module, and this torch has all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvmeio
from nvmeio import _torch_private

ROOT = Path(nvmeio.__file__).parent
HERE = ROOT / "_torch_private.py"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Each private name of torch that a module asks for by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [name for name in [ast.unparse(node)] if re.fullmatch(r"[\w.]+", name)]
        else:
            continue
        for name in names:
            if re.match(r"torch\..*\b_[a-zA-Z]", name):
                yield name


def test_a_private_name_is_found_wherever_it_stands() -> None:
    source = (
        "import torch._utils\n"
        "from torch.utils import _pytree\n"
        "from torch._guards import detect_fake_mode\n"
        "x = torch.serialization._save(a, torch.__version__, torch.Tensor.__reduce_ex__, b)\n"
    )
    assert sorted(private_names(ast.parse(source))) == [
        "torch._guards.detect_fake_mode",
        "torch._utils",
        "torch.serialization._save",
        "torch.utils._pytree",
    ]


def test_no_other_module_names_what_is_private_to_torch() -> None:
    named = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if path != HERE
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert named == set()


def test_each_name_is_used() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py") if path != HERE
    )
    assert [key for key in _torch_private.NAMES if key not in source] == []
    assert [key for key in _torch_private.ATTRIBUTES if key not in source] == []


def test_this_torch_has_all_of_them() -> None:
    assert _torch_private.missing() == []


def test_a_name_that_is_missing_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_is_tracing")
    monkeypatch.delitem(vars(_torch_private), "is_tracing", raising=False)
    with pytest.raises(ImportError, match=r"has no torch\._C\._is_tracing.*refuse jit\.trace"):
        _ = _torch_private.is_tracing
    assert _torch_private.found("is_tracing") is None
    assert any("_is_tracing" in line for line in _torch_private.missing())
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = _torch_private.no_such_name
