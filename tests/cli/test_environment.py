"""docs/cli.md names every variable of the environment that nvmeio reads or sets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nvmeio

ROOT = Path(nvmeio.__file__).parent
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|PATH|PYTHONPATH|HOME|COLUMNS")
_IN_THE_SHIM = {"NV_INTERFACE"}  # a constant of the C code
_RICH = {"NO_COLOR", "COLUMNS"}  # read by rich, for us


def variables(source: str) -> set[str]:
    """Names of variables in a module that looks into the environment; of our own, in any."""
    tree = ast.parse(source)
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    looks = bool(attributes & {"environ", "getenv"})
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {text for text in texts if isinstance(text, str) and _VARIABLE.fullmatch(text)}
    names -= _IN_THE_SHIM
    return {name for name in names if looks or name.startswith("NVMEIO_")}


def test_every_variable_of_the_environment_is_documented() -> None:
    """The page said that nothing else is read, and did not name eight of them."""
    page = (ROOT.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    settings = page.split("\n## Settings\n")[1].split("\n## ")[0]
    named = {text for text in re.findall(r"`([^`]+)`", settings) if _VARIABLE.fullmatch(text)}
    used: set[str] = set()
    for path in ROOT.rglob("*.py"):
        used |= variables(path.read_text(encoding="utf-8"))
    assert used == named - _RICH


def test_the_shim_reads_none() -> None:
    shim = ROOT.parent / "native_shim"
    for path in shim.rglob("*.[ch]"):
        assert "getenv" not in path.read_text(encoding="utf-8"), path.name


def test_variables_are_seen() -> None:
    assert variables("import os\nos.environ.get('A_B')") == {"A_B"}
    assert variables("import os\nNAME = 'A_B'\nos.getenv(NAME)") == {"A_B"}
    assert variables("NAME, OURS = 'A_B', 'NVMEIO_A'") == {"NVMEIO_A"}
