"""The ready-made bars: what they show, that they are over at the end, whatever happens."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable

import pytest
from rich.console import Console
from support import run_python

import nvmeio.progress
from nvmeio.progress import Bar


def rich_bar(out: io.StringIO) -> Bar:
    return nvmeio.progress.rich_bar(Console(file=out, force_terminal=True, width=100))


def tqdm_bar(out: io.StringIO) -> Bar:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    return nvmeio.progress.tqdm_bar(file=out)


BARS = {"rich": rich_bar, "tqdm": tqdm_bar}
Make = Callable[[io.StringIO], Bar]


@pytest.fixture(params=BARS)
def make(request: pytest.FixtureRequest) -> Make:
    return BARS[request.param]


def is_over(out: io.StringIO) -> bool:
    """Whether nothing redraws: rich shows the cursor again, and tqdm begins another line."""
    return out.getvalue().endswith(("\x1b[?25h", "B/s]\n"))


def test_a_bar_shows_what_is_done_and_how_much_of_it(make: Make) -> None:
    out = io.StringIO()
    with make(out) as bar:
        bar("load model.pt", 0, 8 << 20)
        bar("load model.pt", 8 << 20, 8 << 20)
    assert "load model.pt" in out.getvalue()
    assert "8.0" in out.getvalue()


def test_a_bar_is_over_with_the_last_byte(make: Make) -> None:
    """Without a with statement nothing is left that redraws."""
    out = io.StringIO()
    bar = make(out)
    bar("load", 0, 10)
    assert not is_over(out)
    bar("load", 10, 10)
    assert is_over(out)


def test_a_bar_is_over_at_the_end_of_its_with_statement(make: Make) -> None:
    out = io.StringIO()
    with pytest.raises(KeyError), make(out) as bar:
        bar("load", 0, 10)
        raise KeyError
    assert is_over(out)


def test_a_bar_that_is_never_shown_prints_nothing() -> None:
    """`nvmeio pack` ended with an empty line where it is no terminal that it tells."""
    written = io.StringIO()
    bar = nvmeio.progress.rich_bar(Console(file=written, force_terminal=False))
    del bar
    gc.collect()
    assert not written.getvalue()


def test_one_bar_after_another(make: Make) -> None:
    out = io.StringIO()
    with make(out) as bar:
        for what in ("load", "save"):
            bar(what, 0, 10)
            bar(what, 10, 10)
    assert "load" in out.getvalue()
    assert "save" in out.getvalue()


def test_text_of_a_bar_may_change(make: Make) -> None:
    """As in a pack, which names the layer."""
    out = io.StringIO()
    with make(out) as bar:
        for done, what in enumerate(("pack", "layer one", "layer two")):
            bar(what, done, 2)
    assert "layer two" in out.getvalue()


def test_calls_of_several_threads_share_a_bar(make: Make) -> None:
    out = io.StringIO()
    with make(out) as bar:
        bar("here", 0, 10)
        other = threading.Thread(target=bar, args=("there", 3, 10))
        other.start()
        other.join()
        bar("here", 10, 10)
        assert is_over(out) == (make is tqdm_bar)  # whose bars end one by one
    assert is_over(out)
    lines = out.getvalue().splitlines()
    assert any(("here" in line and "100%" in line) or "10/10" in line for line in lines)
    assert "there" in lines[-1] or "there" in lines[-2]


def test_a_missing_tqdm_is_named() -> None:
    done = run_python(
        """
        import sys
        sys.modules["tqdm.auto"] = None
        import nvmeio.progress
        try:
            nvmeio.progress.tqdm_bar()
        except ImportError as missing:
            print(missing)
        """,
    )
    assert "pip install tqdm" in done.stdout


def test_bars_are_imported_when_they_are_made() -> None:
    done = run_python(
        """
        import sys
        import nvmeio
        nvmeio.progress.rich_bar
        print("rich" in sys.modules)
        """,
        fresh=True,
    )
    assert done.stdout.split() == ["False"]
