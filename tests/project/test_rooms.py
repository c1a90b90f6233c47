"""The rules for rooms see what breaks them; `.ci/parts` reports rooms, growth and broken rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rooms import MOST_MODULES, PackageTree, order_on_page

PARTS = Path(__file__).parents[2] / ".ci/parts"
PAGE = """
    nvmeio/
      errors  _low/  lowest
      middle/        above it
      top            above all

A module imports only what stands above it.
"""
# `here` stands for the package: strings that import nvmeio are checked against the real one.
SOURCES = {
    "__init__": "from here import errors",
    "errors": "",
    "_low/__init__": "",
    "_low/work": "from here.errors import E",
    "middle/__init__": "from here.middle import face",
    "middle/_shared": "",
    "middle/face": "from here.middle._one import a\nfrom here.middle._two import b",
    "middle/_one/__init__": "",
    "middle/_one/a": "from here.middle import _shared\nfrom here.middle._two import b",
    "middle/_two/__init__": "",
    "middle/_two/b": "from here._low.work import w",
    "middle/_two/c": "",
    "top": "from here import middle",
}


def write(folder: Path, changes: Mapping[str, str] | None = None) -> PackageTree:
    """A checkout with a package whose order is right but for the changes."""
    for name, text in (SOURCES | dict(changes or {})).items():
        path = folder / "nvmeio" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("here", "nvmeio") + "\n")
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "docs/architecture.md").write_text(PAGE)
    return PackageTree(folder / "nvmeio", allowed=())


def broken(tree: PackageTree) -> list[str]:
    return tree.broken_rules(order_on_page(PAGE, tree))


def test_a_tree_in_order_breaks_no_rule(tmp_path: Path) -> None:
    tree = write(tmp_path)
    assert broken(tree) == []
    assert tree.rooms == [
        "nvmeio",
        "nvmeio._low",
        "nvmeio.middle",
        "nvmeio.middle._one",
        "nvmeio.middle._two",
    ]
    assert tree.inner_imports("nvmeio.middle.face") == {
        "nvmeio.middle._one.a",
        "nvmeio.middle._two.b",
    }


def test_two_rooms_that_import_each_other_are_a_circle_even_if_no_module_does(
    tmp_path: Path,
) -> None:
    (circle,) = broken(write(tmp_path, {"middle/_two/c": "from here.middle._one import a"}))
    assert circle == (
        "_one → _two → _one is a circle in nvmeio.middle: "
        "nvmeio.middle._one.a imports nvmeio.middle._two.b; "
        "nvmeio.middle._two.c imports nvmeio.middle._one.a"
    )


@pytest.mark.parametrize(
    "lines",
    [
        "def later():\n    from here.middle._one import a",
        "from .._one import a",
        "import here.middle._one.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n"
        "    import here.middle._one.a",
    ],
    ids=["in a function", "relative", "plain", "else"],
)
def test_every_import_that_runs_closes_a_circle(tmp_path: Path, lines: str) -> None:
    (circle,) = broken(write(tmp_path, {"middle/_two/c": lines}))
    assert circle.startswith("_one → _two → _one is a circle in nvmeio.middle")


def test_an_import_for_type_checkers_closes_no_circle(tmp_path: Path) -> None:
    lines = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import here.middle._one.a"
    assert broken(write(tmp_path, {"middle/_two/c": lines})) == []


def test_modules_of_one_room_may_not_go_in_a_circle_with_a_room_below(tmp_path: Path) -> None:
    """A shared private module is no face, and a circle all the same."""
    (circle,) = broken(
        write(
            tmp_path,
            {
                "middle/_shared": "from here.middle._two import b\n",
                "middle/_two/c": "from here.middle import _shared",
            },
        )
    )
    assert circle.startswith("_shared → _two → _shared is a circle in nvmeio.middle")


@pytest.mark.parametrize("face", ["nvmeio.middle", "nvmeio.middle.face"])
def test_an_underscored_room_does_not_import_its_face(tmp_path: Path, face: str) -> None:
    """Not for types either."""
    lines = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {face}"
    assert broken(write(tmp_path, {"middle/_two/c": lines})) == [
        f"nvmeio.middle._two.c imports {face}, which stands above it"
    ]


def test_the_order_of_the_page_is_the_order_of_imports(tmp_path: Path) -> None:
    assert broken(write(tmp_path, {"_low/work": "from here.middle import face"}))[-1] == (
        "nvmeio._low.work imports nvmeio.middle.face, which stands above it"
    )
    assert broken(write(tmp_path, {"new": ""})) == [
        "nvmeio.new has no place in the order of docs/architecture.md"
    ]


def test_a_room_has_fourteen_modules_at_most(tmp_path: Path) -> None:
    """`__init__` and `__main__` do not count, and neither do rooms within."""
    full = {f"_low/m{number}": "" for number in range(1, MOST_MODULES)} | {"_low/__main__": ""}
    assert broken(write(tmp_path, full)) == []
    (crowded,) = broken(write(tmp_path, full | {"_low/more": ""}))
    assert crowded == (
        f"nvmeio._low has 15 modules, at most {MOST_MODULES} fit in a room: give a subject of it "
        "a room of its own"
    )


# The report

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")


def report(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PARTS, folder],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"} | environment,
    )


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_the_report_says_that_there_is_no_git(tmp_path: Path) -> None:
    write(tmp_path)
    done = report(tmp_path, PATH="/nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rows = done.stdout.splitlines()
    assert first == ("no release to compare with: git cannot be run (No such file or directory)")
    assert ["nvmeio/middle/_two", "3", "1"] in [row.split() for row in rows]
    assert rows[-1].split() == ["all", "13", "9"]


@needs_git
def test_the_report_says_what_grew_since_the_last_release(tmp_path: Path) -> None:
    write(tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert report(tmp_path).stdout.startswith("no release to compare with: fatal: No names found")
    git(tmp_path, "tag", "v1.0")
    write(tmp_path, {"middle/_two/d": "a = 1\nb = (\n    2\n)  # of four lines\n\n# none\n"})
    shutil.rmtree(tmp_path / "nvmeio/_low")
    done = report(tmp_path)
    assert done.returncode == 0
    rows = {row.split()[0]: row.split()[1:] for row in done.stdout.splitlines()}
    assert rows["room"] == ["modules", "lines", "since", "v1.0"]
    assert rows["nvmeio/middle/_two"] == ["4", "5", "+1", "modules", "+4", "lines"]
    assert rows["nvmeio/_low"] == ["0", "0", "-2", "modules", "-1", "lines"]
    assert rows["nvmeio/middle"] == ["3", "3"]


def test_the_report_refuses_a_broken_rule(tmp_path: Path) -> None:
    write(tmp_path, {"middle/_two/c": "import here.middle"})
    done = report(tmp_path)
    assert done.returncode == 1
    assert "nvmeio.middle._two.c imports nvmeio.middle, which stands above it" in done.stderr
    assert "is a circle in nvmeio.middle" in done.stderr


def test_this_tree_breaks_no_rule() -> None:
    done = subprocess.run([sys.executable, PARTS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
