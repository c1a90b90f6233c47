"""The fenced blocks of README.md and docs/, and what stands beside them in comments.

A reader does not see these lines, each above the block that it is about:

    <!-- given                 Python that runs first: names that the reader has, such as `model`
    model = ...
    -->
    <!-- needs: transformers   a package; where it is absent the block is skipped by name
    <!-- ranks: 1, 2           run by so many processes, in one group of gloo's; else by 1
    <!-- here: 64G = 64M       other words in its place: a size, a path
    <!-- not run: REASON       compiled only

The blocks of a page share their names, as cells of a notebook do. /mnt/ is the test's own folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(
    r"^(?P<comments>(?:<!--(?:(?!-->).)*-->\n)*)"
    r"(?P<fence>```+)(?P<language>\w*)\n(?P<code>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"<!--\s*(given|needs:|ranks:|here:|not run:)(.*?)-->", re.DOTALL)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    code: str
    given: str
    needs: tuple[str, ...]
    ranks: tuple[int, ...]  # how many processes run it: a program for each number
    not_run: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The blocks of a page in these languages, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        if match["language"] not in languages:
            continue
        code, said = match["code"], {"given": "", "needs:": "", "ranks:": "", "not run:": ""}
        for kind, rest in _COMMENT.findall(match["comments"]):
            if kind == "here:":
                there, _, here = rest.strip().partition(" = ")
                assert there in code, f"{page}: {there!r} is not in the block"
                code = code.replace(there, here)
            else:
                said[kind] += rest
        line = text.count("\n", 0, match.start("code")) + 1
        needs = tuple(said["needs:"].replace(",", " ").split())
        ranks = tuple(int(number) for number in said["ranks:"].split(",") if number.strip())
        not_run = said["not run:"].strip()
        yield Block(
            page, line, match["language"], code, said["given"], needs, ranks or (1,), not_run
        )
