"""All messages of errors, read as prose: they say what is wrong in English, and what to do.

They are collected from the sources: every text within a `raise`, and every text that is given to
the name of an exception, or to a function that makes one. A part that is filled in at run time is
shown as ``{expression}``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nvmeio

PACKAGE = Path(nvmeio.__file__).parent


class Message(NamedTuple):
    place: str
    error: str
    text: str


def text_of(node: ast.expr) -> str | None:
    """A text as it is shown; None for what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (text_of(part) for part in node.values)
        return "".join(part for part in parts if part is not None)
    if isinstance(node, ast.FormattedValue):
        shown = "!r" if node.conversion == ord("r") else ""
        return f"{{{ast.unparse(node.value)}{shown}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (text_of(node.left), text_of(node.right))
        if any(side is not None for side in sides):
            return "".join("{…}" if side is None else side for side in sides)
    return None


def makers(nodes: list[ast.AST]) -> set[str]:
    """Functions of a module that return an error: what they are given is worded for one."""
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).endswith(("Error", "Exception", "BaseException"))
    }


def name_of(function: ast.expr) -> str:
    """What is called: the last of its names."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return function.attr
    return ast.unparse(function).rpartition(".")[2]


def texts_of(call: ast.Call) -> Iterator[str]:
    given = [*call.args, *(word.value for word in call.keywords if word.arg in WORDED)]
    for argument in given:
        choices = (
            [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
        )
        for choice in choices:
            text = text_of(choice)
            if text is not None and text.count(" ") >= 2:
                yield text


# What of an error's keywords is prose.
WORDED = ("detail", "remedy")


@functools.cache
def messages() -> list[Message]:
    """Read when a test asks: not by each process of several, which only collects this module."""
    modules = {
        path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(PACKAGE.rglob("*.py"))
    }
    makes = set[str]().union(*map(makers, modules.values()))
    found = []
    for path, nodes in modules.items():
        raised = {id(node.exc) for node in nodes if isinstance(node, ast.Raise)}
        for node in nodes:
            if isinstance(node, ast.Call):
                name = name_of(node.func)
                if id(node) in raised or name in makes or name.endswith("Error"):
                    place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                    found += [Message(place, name, text) for text in texts_of(node)]
    return found


def wrong(rule: str) -> list[str]:
    return [
        f"{message.place}: …{message.text[max(0, at.start() - 30) : at.end() + 30]}…"
        for message in messages()
        if not any(words in message.text for words in THEIRS)
        for at in re.finditer(rule, message.text)
    ]


def test_all_are_found() -> None:
    """One of each way to word one; else this file reads nothing."""
    texts = [message.text for message in messages()]
    assert len(texts) > 700
    for known in (
        "a SwappedModule has no",
        "choose another directory, or restore from this one",
        "pip install . in the source tree",
    ):
        assert any(known in text for text in texts), known


# Written with a vowel and spoken without, and the other way round.
SPOKEN = r"(?:one|once|uni|use|user|usual|euro|utf)"
SPELT = r"(?:hour|honest|fsync|fp\d|xfs|x86|nvme|nd\b|lru|lora|mmap|rcu|ssd)"
CONSONANT = r"(?![A-Z]{2})[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z]"


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rf"\b[Aa] (?!{SPOKEN})[aeiouAEIOU]\w*", id="a before a vowel"),
        pytest.param(rf"\b[Aa]n (?!{SPELT}){CONSONANT}\w*", id="an before a consonant"),
        pytest.param(r"\b[Aa]n? \{type\(|\b[Aa]n? \{\w*\.?__name__", id="a type: say an(...)"),
    ],
)
def test_articles_fit(rule: str) -> None:
    assert not wrong(rule), "\n".join(wrong(rule))


# Things that come one at a time as well. Bytes are a unit, as seconds are.
COUNTED = (
    "blocks|chunks|devices|directories|drives|elements|files|handles|items|keys|layers|members|"
    "messages|names|operations|parameters|parts|pieces|places|processes|ranks|records|requests|"
    "rows|samples|shards|shares|steps|storages|tensors|threads|tiles|tokens|units|weights"
)
# "names" as a verb; numbers that are never one; kinds and texts, which are no numbers.
NO_NUMBERS = (
    "names ",
    "_MOST_",
    "names[",
    ".type",
    "dtype",
    "sequences",
    "of use",
    "embedding",
    "cannot fill",
)


def test_one_of_something_is_not_several() -> None:
    """`counted(1, "operation")` says "1 operation"; a number before a plural "1 operations"."""
    found = wrong(rf"\{{(?![^}}]*counted\()[^}}]*\}} (?:{COUNTED})\b(?! of\b)")
    found = [line for line in found if not any(word in line for word in NO_NUMBERS)]
    assert not found, "\n".join(found)


# Other libraries' own words, which code that compares messages knows.
THEIRS = (
    "enable anomaly detection",
    "Some tensors share memory",
    "You are trying to save",
    "`storage_options`",
)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(r"[.!,;:\s]\Z", id="ends without a stop"),
        pytest.param(r"  |\n\n\n", id="one space"),
        pytest.param(r" [,;:.](?: (?!in the source)|\Z)", id="no space before a stop"),
        pytest.param(r"\b([a-z]{2,}) \1\b", id="a word twice"),
        pytest.param(r"\b(?:can not|didn't|doesn't|isn't|won't|please|sorry|oops)\b", id="tone"),
        pytest.param(
            r"\A(?:Of|What|Who|Whoever|Where) |\bthat is none\b(?! of)|\bwhich is none\b(?! of)|"
            r"\bnobody can say\b|\bfor ever\b|\bis none, such\b",
            id="riddles",
        ),
    ],
)
def test_they_are_plain_sentences(rule: str) -> None:
    assert not wrong(rule), "\n".join(wrong(rule))


# What a caller can put right says how: after a colon or a semicolon, or by what must be.
FIX = (
    r"[:;(] ?|\b(?:must|use|call|instead|give|take|takes|name|needs?|expected|at most|possible|"
    r"only|first|again|is for|are for)\b|, not |not \{|\{likely\}|\{nearest\("
)
CALLERS = ("TypeError", "ValueError", "ClosedError", "KeyError")
# Not a caller's mistakes: what is damaged on a drive, which an `IntegrityError` around it says, and
# agreements within the package.
INNER = (
    "_formats/",
    "_io/spans.py",
    "_distributed/",
    "_storage/",
    "checkpoint/_restoring.py",
    "checkpoint/_snapshot/",
    "inference/_plan/packed_format.py",
    "inference/prefixes.py",
    "offload/_generations/",
    "offload/_swap_files/manifests.py",
)


def test_what_a_caller_can_put_right_says_how() -> None:
    silent = [
        f"{message.place} {message.error}: {message.text}"
        for message in messages()
        if message.error in CALLERS and not message.place.startswith(INNER)
        if not re.search(FIX, re.sub(r"\{(?!likely|nearest)[^{}]*\}", "{}", message.text))
    ]
    assert not silent, "\n".join(silent)


REMEDIED = ("cli/tune/rig.py", "integrations/dcp/writing.py", "offload/_module/sharded.py")


def test_what_cannot_be_had_says_how_to_get_it() -> None:
    """`BackendUnavailableError` has a remedy, or the reasons of what was tried."""
    silent = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # Of these the message says what to do, or it is about this torch.
        if path.relative_to(PACKAGE).as_posix() in REMEDIED:
            continue
        source = path.read_text()
        if "BackendUnavailableError" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "BackendUnavailableError":
                words = {word.arg for word in node.keywords}
                if not words & {"remedy", "attempts", None}:
                    silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not silent, "\n".join(silent)
