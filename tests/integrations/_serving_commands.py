"""The commands of docs/serving.md, as a shell would see them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def commands(of: str) -> list[list[str]]:
    """The arguments behind each command that begins with these words, on whatever line."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        text = re.sub(r"\s# .*$", "", block, flags=re.MULTILINE).replace("\\\n", " ")
        command = ""
        for line in text.splitlines():
            command += line + "\n"
            if command.count("'") % 2 == 0:  # or it goes on within quotes
                _, named, behind = command.partition(of)
                if named:
                    found.append(shlex.split(behind))
                command = ""
    return found
