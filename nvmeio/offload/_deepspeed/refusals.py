"""The refusals of a configuration: all that it cannot have, told as one error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Refusals:
    """The refused keys of one configuration, in the order in which they were met."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        """Refuse a key: which, why, and what to write instead."""
        if line not in self._lines:
            self._lines.append(line)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """A ``with`` block whose ValueError is one refusal more."""
        try:
            yield
        except ValueError as refused:
            self.add(str(refused))

    def check(self) -> None:
        """Raise ValueError with all refusals, a line each, if there are any."""
        if not self._lines:
            return
        if len(self._lines) == 1:
            raise ValueError(self._lines[0])
        listed = "\n".join(f"- {line}" for line in self._lines)
        raise ValueError(f"the configuration has {len(self._lines)} refused settings:\n{listed}")

    def __len__(self) -> int:
        return len(self._lines)
