"""Sizes, times, counts as people write them: sizes binary (1K = 1024), rates in 10**9 bytes."""

from __future__ import annotations

import re

import typer

from nvmeio._checks import parse_size as parse_size

GB = 1e9

_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?", re.IGNORECASE)


def printable(text: str) -> str:
    """A text that does nothing to the terminal: control characters as their escapes.

    Names come out of files, and files from anywhere.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, what: str) -> str:
    """Such as "1 record" and "2 records"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def parse_duration(text: str) -> float:
    """Seconds from "60s", "90", "2m" or "1h".

    Raises:
        ValueError: It is none, or not positive.
    """
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a time: write seconds, or a number with s, m or h")
    seconds = float(found[1]) * _SECONDS[(found[2] or "").lower()]
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def size_option(value: str | int) -> int:
    """`parse_size` for an option; a default comes as the number that it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def duration_option(value: str | float) -> float:
    """`parse_duration` for an option."""
    if not isinstance(value, str):
        return value
    try:
        return parse_duration(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def binary_size(nbytes: int) -> str:
    """A size for people, such as 1.5 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    size = nbytes / 1024**power
    digits = 0 if size >= 100 or size.is_integer() else 1
    return f"{size:.{digits}f} {units[power]}"
