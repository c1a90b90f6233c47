"""Every figure of README and docs, measured again: `make figures`, 45 minutes, 50 at most.

    python benchmarks/figures.py                        # run all, then write the tables
    python benchmarks/figures.py --only small,transfers # those; other figures stay as they are
    python benchmarks/figures.py --tables               # run nothing, write the tables
    python benchmarks/figures.py --check                # are the tables what the JSON says?
    python benchmarks/figures.py --small                # tiny, into a scratch folder: a trial

Each part is a benchmark with its rows and its time. Its JSON goes to benchmarks/measured/, with the
commit, the machine and the day. One that takes longer is interrupted, and the rows that it has are
kept. Measure with nothing else running. A peer that is missing is named below its table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import _figure_tables as tables

HERE = Path(__file__).resolve().parent
WHOLE_LIMIT_S = 3000
COMPILE_LIMIT_S = 400
# What a part that was interrupted gets to remove its files and to write its JSON.
LAST_WORDS_S = 40

_TRANSFERS = ("native_shim", "nvmeio/_core", "nvmeio/engines", "nvmeio/_memory", "nvmeio/_files")
_FILES = (*_TRANSFERS, "nvmeio/_io", "nvmeio/_storage", "nvmeio/_formats")
_SAVES = (*_FILES, "nvmeio/checkpoint/saving.py")
_LOADS = (*_FILES, "nvmeio/checkpoint/loading.py", "nvmeio/checkpoint/_unpickling.py")
_MANAGER = (*_FILES, "nvmeio/checkpoint")


@dataclass(frozen=True)
class Part:
    """What is measured in one go, into one file.

    Attributes:
        program: In benchmarks/ or examples/.
        arguments: Its command line.
        small: The same for `--small`.
        limit_s: It is interrupted after so many seconds.
        code: What each row measures, for `stale`; "" stands for the rows that are not named.
    """

    program: str
    arguments: Sequence[str]
    small: Sequence[str]
    limit_s: int
    code: Mapping[str, Sequence[str]]


_TINY = ("--quick", "--size", "64M", "--repeats", "1")
PARTS: Mapping[str, Part] = {
    "demo": Part(
        "../examples/01_await_beside_compute.py", (), ("--size", "64M"), 120, {"": _TRANSFERS}
    ),
    "transfers": Part(
        "compare_peers.py",
        ("--only", "sequential,cpu,first-write,unpinned,random,disturbed,lag", "--repeats", "3"),
        _TINY,
        480,
        {"": _TRANSFERS},
    ),
    "small": Part("small.py", ("--size", "4G", "--repeats", "3"), _TINY, 480, {"": _TRANSFERS}),
    "checkpoint": Part(
        "checkpoint.py",
        ("--only", "save,load,sizes,dcp,small,steady,held,protect", "--repeats", "3"),
        _TINY,
        1500,
        {"save": _SAVES, "load": _LOADS, "small": (*_SAVES, *_LOADS), "sizes": (*_SAVES, *_LOADS),
         "dcp": (*_FILES, "nvmeio/integrations/dcp"), "": _MANAGER},
    ),
    "inference": Part(
        "inference.py",
        ("--only", "pass,accelerate,deepspeed,blocks", "--repeats", "3"),
        _TINY,
        420,
        {"": (*_FILES, "nvmeio/_residency", "nvmeio/inference")},
    ),
    "offload": Part(
        "offload.py",
        ("--only", "step,deepspeed,passes,activations", "--repeats", "3"),
        _TINY,
        420,
        {"": (*_FILES, "nvmeio/_residency", "nvmeio/offload")},
    ),
}  # fmt: skip


def main() -> int:
    options = _parsed()
    if options.check:
        return _check()
    if options.tables:
        return _write_tables(tables.MEASURED, tables.ROOT)
    into, root = tables.MEASURED, tables.ROOT
    if options.small:
        root = Path(tempfile.mkdtemp(prefix="nvmeio-figures-"))
        into = root / "measured"
        for page in tables.pages():
            copy = root / page.relative_to(tables.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(page, copy)
    into.mkdir(exist_ok=True)
    _compile_ops(options.only)
    ends = time.monotonic() + WHOLE_LIMIT_S
    failed = []
    for name in options.only:
        if not _measure(name, into / f"{name}.json", options.dir, options.small, ends):
            failed.append(name)
    status = _write_tables(into, root)
    if failed:
        print(f"== no figures of {', '.join(failed)}: see above", file=sys.stderr)
    return status or bool(failed)


_COMPILE = """
import pathlib, sys
from _session import TARGETS, start_worker
start_worker(TARGETS[sys.argv[1]], pathlib.Path("/dev/null")).close()
"""


def _compile_ops(parts: Sequence[str]) -> None:
    """Have DeepSpeed compile its ops, which takes minutes once, before any time is counted."""
    peers = {"transfers": "DeepSpeed", "inference": "ZeRO-3 inference", "offload": "ZeRO-3"}
    for part, peer in peers.items():
        if part in parts:
            print(f"== starting {peer}, which compiles what it lacks", file=sys.stderr, flush=True)
            command = [sys.executable, "-c", _COMPILE, peer]
            try:
                # Its absence is told by the benchmark.
                subprocess.run(command, cwd=HERE, timeout=COMPILE_LIMIT_S, capture_output=True)
            except subprocess.TimeoutExpired:
                print(
                    f"== {peer} did not start in {COMPILE_LIMIT_S} s. If nothing compiles, an "
                    "earlier compilation was cut short: remove */*/lock in "
                    "~/.cache/torch_extensions",
                    file=sys.stderr,
                )


def _measure(name: str, json_path: Path, directory: Path, small: bool, ends: float) -> bool:
    """Run one part; whether its JSON was written anew."""
    part = PARTS[name]
    limit_s = min(part.limit_s, ends - time.monotonic() - LAST_WORDS_S)
    if small:
        limit_s = 600.0  # whether it works is the question, on however busy a machine
    if limit_s < 10:
        print(f"== {name}: no time is left; make figures FIGURES={name}", file=sys.stderr)
        return False
    print(f"== {name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
    fresh = json_path.with_suffix(".new")
    program = (HERE / part.program).resolve()
    command = [sys.executable, str(program), *(part.small if small else part.arguments)]
    command += ["--dir", str(directory)]
    demo = name == "demo"
    if not demo:
        command += ["--json", str(fresh)]
    started = time.monotonic()
    output = _run(command, limit_s, quiet=demo)
    if demo and output:
        text = [line for line in output.splitlines() if not line.startswith("==")]
        measured = {"commit": tables.current_commit(), "date": date.today().isoformat()}
        fresh.write_text(json.dumps({"measured": measured, "output": text}, indent=1) + "\n")
    written = fresh.exists()
    if written:
        # Where it was measured is of no interest elsewhere.
        fresh.write_text(fresh.read_text().replace(str(directory.resolve()), "DIR"))
        os.replace(fresh, json_path)
    took = time.monotonic() - started
    print(f"== {name}: {'measured' if written else 'FAILED'} in {took:.0f} s", file=sys.stderr)
    return written


def _run(command: Sequence[str], limit_s: float, quiet: bool) -> str:
    """A program's output, if it is wanted; past its time it is interrupted, and then killed."""
    out = subprocess.PIPE if quiet else None
    with subprocess.Popen(command, stdout=out, text=True, start_new_session=True) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            print(f"== interrupted after {limit_s:.0f} s", file=sys.stderr)
            process.send_signal(signal.SIGINT)
            try:
                text, _ = process.communicate(timeout=LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return (text or "") if process.returncode == 0 else ""


def _write_tables(measured: Path, root: Path) -> int:
    reports = tables.read_reports(measured)
    for page in tables.pages(root):
        text = page.read_text()
        made = tables.written_into(text, reports)
        if made != text:
            page.write_text(made)
        print(f"== {page}: {'written' if made != text else 'as it was'}", file=sys.stderr)
    return 0


def _check() -> int:
    """Warn of figures older than their code; fail where tables differ from the JSON."""
    reports = tables.read_reports()
    for name, report in reports.items():
        for sentence in tables.stale(name, report, PARTS[name].code):
            print(f"warning: figures of {sentence}; make figures FIGURES={name}", file=sys.stderr)
    wrong = [
        str(page.relative_to(tables.ROOT))
        for page in tables.pages()
        if tables.written_into(page.read_text(), reports) != page.read_text()
    ]
    if wrong:
        print(
            f"tables differ from benchmarks/measured: {', '.join(wrong)}; run make tables",
            file=sys.stderr,
        )
    return bool(wrong)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--small", action="store_true", help="tiny, into a scratch folder")
    parser.add_argument("--tables", action="store_true", help="write the tables, run nothing")
    parser.add_argument("--check", action="store_true", help="compare the tables with the JSON")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}, not {', '.join(unknown)}")
    return [name for name in PARTS if name in asked] or list(PARTS)


if __name__ == "__main__":
    sys.exit(main())
