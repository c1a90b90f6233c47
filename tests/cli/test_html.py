"""The page of `nvmeio tune --html`: complete in itself, and drawn well by a real browser.

The browser is Debian's chromium, without a window. A script that is added to a copy of the page
measures what was drawn and leaves its findings in the document, which chromium then prints.
"""

import json
import random
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nvmeio.cli import app
from nvmeio.cli._tune import charts, page
from nvmeio.cli._tune.result import Latencies, Result
from nvmeio.cli._tune.search import Op, Search
from nvmeio.cli._tune.space import DEFAULT, Grid, default_grid, settings
from nvmeio.engines.base import Options

MIB = 1 << 20
GRID = {**default_grid(), "intra_op_parallelism": [1, 2, 4]}

PROBE = """
<script>
const faults = [];
addEventListener('error', event => faults.push(String(event.message)));
addEventListener('load', () => {
  const boxes = element => element.getBoundingClientRect();
  const overlaps = [], outside = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = boxes(svg);
    const words = [...svg.querySelectorAll('text')].filter(text => text.textContent);
    for (const [index, text] of words.entries()) {
      const box = boxes(text);
      if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
          box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        outside.push(text.textContent);
      for (const other of words.slice(index + 1)) {
        const next = boxes(other);
        if (box.left < next.right - 1 && next.left < box.right - 1 &&
            box.top < next.bottom - 3 && next.top < box.bottom - 3)
          overlaps.push(text.textContent + ' / ' + other.textContent);
      }
    }
  }
  const style = getComputedStyle(document.body);
  const found = {
    faults, overlaps, outside,
    svgs: document.querySelectorAll('svg').length,
    empty: [...document.querySelectorAll('svg')].filter(svg => !boxes(svg).height).length,
    cells: document.querySelectorAll('.cell').length,
    frames: document.querySelectorAll('.frame').length,
    colours: new Set([...document.querySelectorAll('.cell rect')].map(
      rect => getComputedStyle(rect).fill)).size,
    width: document.documentElement.scrollWidth, window: innerWidth,
    requests: performance.getEntriesByType('resource').map(entry => entry.name),
    background: style.backgroundColor, ink: style.color,
    title: document.title, heading: document.querySelector('h1').textContent,
  };
  document.body.append(Object.assign(document.createElement('pre'),
    {id: 'probe', textContent: JSON.stringify(found)}));
});
</script>
"""


def search(grid: Grid, ops: list[Op], budget_s: float) -> Result:
    """A result as a drive of 3 GB/s with a liking for 2 MiB blocks would give it."""
    now, noise = [0.0], random.Random(0)

    def measure(setting: Options, op: Op, nbytes: int) -> float:
        rate = min(3e9, setting.block_size * setting.queue_depth * 400)
        rate *= 1.1 if setting.block_size == 2 * MIB else 1
        rate *= noise.gauss(1, 0.01) * (0.9 if setting.single_submit else 1)
        now[0] += nbytes / rate + 0.001
        return nbytes / rate

    outcome = Search(settings(grid), ops, 400 * MIB, measure, lambda: now[0]).run(budget_s)
    latencies = [
        Latencies(setting, op, [noise.lognormvariate(-6, 0.4) for _ in range(2000)])
        for op in ops
        for setting in dict.fromkeys((outcome.winner, DEFAULT))
    ]
    where = [Path('/mnt/<fast> & "narrow"')]
    return Result(outcome, ops, where, "libaio", True, 400 * MIB, budget_s, now[0], grid, latencies)


@pytest.fixture(scope="module")
def whole() -> Result:
    return search(GRID, ["read", "write"], 60.0)


def browse(document: str, directory: Path, *flags: str) -> dict[str, Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    probed = directory / "probed.html"
    probed.write_text(document.replace("</head>", PROBE + "</head>"))
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
         f"--user-data-dir={directory / 'profile'}", *flags, "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    shutil.rmtree(directory / "profile", ignore_errors=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(unescape(found[1]))
    return told


# In a browser


def test_a_browser_draws_it_without_faults(whole: Result, tmp_path: Path) -> None:
    found = browse(page.render(whole), tmp_path, "--window-size=1200,900")
    assert found["faults"] == []
    assert found["requests"] == []
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert found["svgs"] == 1 + 2 * 3 + 4 + 2  # the final, heat maps, throughput, latency
    assert found["empty"] == 0
    assert found["cells"] + page.render(whole).count('data-tip="not measured"') == 2 * 3 * 6 * 5
    assert found["frames"] == 2  # the chosen setting, in each direction
    assert found["colours"] > 8
    assert found["width"] <= found["window"]
    assert found["title"] == 'nvmeio tune: /mnt/<fast> & "narrow"'


def test_a_dark_screen_gets_dark_paper_and_a_narrow_one_no_sideways_scrolling(
    whole: Result, tmp_path: Path
) -> None:
    flags = ("--blink-settings=preferredColorScheme=0", "--window-size=500,900")
    found = browse(page.render(whole), tmp_path, *flags)
    paper, ink = (sum(map(int, re.findall(r"\d+", found[k])[:3])) for k in ("background", "ink"))
    assert paper < 100 < 600 < ink
    assert found["width"] <= found["window"]
    assert found["faults"] == []


# In itself


def test_it_loads_nothing_from_anywhere(whole: Result) -> None:
    document = page.render(whole)
    assert re.findall(r"(?:src|href|url|import)\s*[=(]", document) == []
    assert "http" not in document
    assert "<fast>" not in document  # a directory's name is text, never markup
    assert len(document) < 400_000


@pytest.mark.parametrize(
    ("grid", "ops", "budget_s", "heads"),
    [
        (GRID, ["read"], 60.0, {"The final", "Throughput", "Latency"}),
        (GRID, ["read", "write"], 3.0, {"Throughput", "Latency"}),
        ({**GRID, "block_size": [MIB]}, ["write"], 20.0, {"The final", "Throughput"}),
        ({k: [v] for k, v in DEFAULT._asdict().items()}, ["read"], 5.0, {"Latency"}),
    ],
)
def test_what_was_not_measured_is_left_out(
    grid: Grid, ops: list[Op], budget_s: float, heads: set[str]
) -> None:
    document = page.render(search(grid, ops, budget_s))
    shown = set(re.findall(r"<h2>(.*?)</h2>", document))
    assert heads | {"The setting", "Block size and queue depth", "Conditions"} <= shown
    assert ("write" in document.split("<h2>")[0].split("</style>")[1]) is ("write" in ops)
    assert "nan" not in document and "inf" not in document.replace("info", "")


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "grid.json").write_text('{"queue_depth": [4, 8, 128], "block_size": ["1M", "64K"]}')
    out = tmp_path / "page.html"
    flags = ["--budget", "2s", "--io-size", "4M", "--sweep-config", str(tmp_path / "grid.json")]
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--html", str(out), *flags])
    assert done.exit_code == 0, done.stderr
    document = out.read_text()
    assert "<h2>Latency</h2>" in document
    assert str(tmp_path) in document


# Parts


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 3.9, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (-0.031, 0.12, [-0.05, 0.0, 0.05, 0.1, 0.15]),
        (2.31, 2.36, [2.31, 2.32, 2.33, 2.34, 2.35, 2.36]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, ticks: list[float]) -> None:
    assert charts.nice_ticks(low, high) == pytest.approx(ticks)


def test_labels_are_moved_apart_and_stay_inside() -> None:
    lines = [charts.Line(str(n), 0, []) for n in range(4)]
    ends = [(0.0, y, line) for y, line in zip((50.0, 51.0, 52.0, 90.0), lines, strict=True)]
    places = [place for _, _, place, _ in charts._apart(ends, 10, 0, 100)]
    assert places == [41.0, 51.0, 61.0, 90.0]
    low = [place for _, _, place, _ in charts._apart([(0, 99.0, lines[0])] * 3, 10, 0, 100)]
    assert low == [80.0, 90.0, 100.0]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(2.5e-6, "2.5 µs"), (0.0005, "500 µs"), (0.001, "1 ms"), (0.0125, "12 ms"), (3.0, "3 s")],
)
def test_latencies_are_shown_in_units_of_their_size(seconds: float, shown: str) -> None:
    assert charts.duration(seconds) == shown
