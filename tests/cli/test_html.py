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
from nvmeio.cli.measure import Op
from nvmeio.cli.tune import page
from nvmeio.cli.tune.result import Latencies, TunePlan, TuneResult
from nvmeio.cli.tune.search import Search
from nvmeio.cli.tune.space import DEFAULT, Grid, default_grid
from nvmeio.engines.base import Options

MIB = 1 << 20
GRID = {**default_grid(), "intra_op_parallelism": [1, 2, 4]}

PROBE = """
<script>
const faults = [];
addEventListener('error', event => faults.push(String(event.message)));
addEventListener('load', () => setTimeout(() => {
  const box = element => element.getBoundingClientRect();
  const clipped = [];
  for (const plot of document.querySelectorAll('.js-plotly-plot')) {
    const frame = box(plot);
    for (const text of plot.querySelectorAll('text')) {
      const here = box(text);
      if (text.textContent && here.width && (here.left < frame.left - 1 ||
          here.right > frame.right + 1 || here.top < frame.top - 1 ||
          here.bottom > frame.bottom + 1))
        clipped.push(text.textContent);
    }
  }
  const style = getComputedStyle(document.body);
  const plots = [...document.querySelectorAll('.js-plotly-plot')];
  const found = {
    faults, clipped,
    plots: plots.length,
    empty: plots.filter(plot => !plot.querySelector('.subplot')).length,
    too_wide: plots.filter(plot => box(plot).right > box(document.body).right).length,
    beside_bars: [...document.querySelectorAll('.bartext-outside')].map(
      text => getComputedStyle(text).fill),
    unnamed: [...document.querySelectorAll('figure')].filter(figure =>
      !figure.querySelector('figcaption') || !figure.querySelector('.plot[role=img][aria-label]')
    ).length,
    cells: document.querySelectorAll('.heatmap-label').length,
    frames: document.querySelectorAll('.shapelayer path').length,
    width: document.documentElement.scrollWidth, window: innerWidth,
    requests: performance.getEntriesByType('resource').map(entry => entry.name),
    background: style.backgroundColor, ink: style.color,
    tick: getComputedStyle(document.querySelector('.xtick text')).fill,
    title: document.title, heading: document.querySelector('h1').textContent,
  };
  document.body.append(Object.assign(document.createElement('pre'),
    {id: 'probe', textContent: JSON.stringify(found)}));
}, 500));
</script>
"""


def search(grid: Grid, ops: list[Op], budget_s: float) -> TuneResult:
    """A result as a drive of 3 GB/s with a liking for 2 MiB blocks would give it."""
    now, noise = [0.0], random.Random(0)

    def measure(setting: Options, op: Op, nbytes: int) -> float:
        rate = min(3e9, setting.block_size * setting.queue_depth * 400)
        rate *= 1.1 if setting.block_size == 2 * MIB else 1
        rate *= noise.gauss(1, 0.01) * (0.9 if setting.single_submit else 1)
        now[0] += nbytes / rate + 0.001
        return nbytes / rate

    outcome = Search(grid, ops, 400 * MIB, measure, lambda: now[0]).run(budget_s)
    latencies = [
        Latencies(setting, op, [noise.lognormvariate(-6, 0.4) for _ in range(2000)])
        for op in ops
        for setting in dict.fromkeys((outcome.winner, DEFAULT))
    ]
    where = [Path('/mnt/<fast> & "narrow"')]
    plan = TunePlan(where, ops, grid, 400 * MIB, budget_s)
    return TuneResult(plan, outcome, "libaio", True, now[0], latencies)


@pytest.fixture(scope="module")
def whole() -> TuneResult:
    return search(GRID, ["read", "write"], 30.0)


def browse(document: str, directory: Path, *flags: str) -> dict[str, Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    probed = directory / "probed.html"
    probed.write_text(document.replace("</head>", PROBE + "</head>"))
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
         f"--user-data-dir={directory / 'profile'}", *flags, "--virtual-time-budget=20000",
         "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    shutil.rmtree(directory / "profile", ignore_errors=True)
    found = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(unescape(found[-1]))
    return told


# In a browser


def test_a_browser_draws_it_without_faults(whole: TuneResult, tmp_path: Path) -> None:
    found = browse(page.render(whole), tmp_path, "--window-size=1200,900")
    assert found["faults"] == []
    assert found["requests"] == []
    assert found["clipped"] == []
    # The final, heat maps, parameters, the search, latency.
    assert found["plots"] == 1 + 2 * 3 + 5 + 2 + 2
    assert found["empty"] == found["too_wide"] == found["unnamed"] == 0
    assert found["cells"] > 50
    assert found["frames"] >= 2 + 1  # the chosen setting in each direction; the final's nought
    assert found["width"] <= found["window"]
    assert found["title"] == 'nvmeio tune: /mnt/<fast> & "narrow"'


def test_a_dark_screen_gets_dark_paper_and_a_phone_no_sideways_scrolling(
    tmp_path: Path,
) -> None:
    """Of 400 pixels, and with the settings that take the most words."""
    wordy = search(GRID | {"single_submit": [True], "overlap_events": [False]}, ["read"], 60.0)
    narrow = page.render(wordy).replace("</head>", "<style>body{width:400px}</style></head>")
    flags = ("--blink-settings=preferredColorScheme=0", "--window-size=500,900")
    found = browse(narrow, tmp_path, *flags)

    def light(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert light(found["background"]) < 100 < 600 < light(found["ink"])
    assert light(found["tick"]) > 600
    assert found["beside_bars"] and min(map(light, found["beside_bars"])) > 600
    assert found["width"] <= found["window"]
    assert found["too_wide"] == 0
    assert found["faults"] == found["clipped"] == []


# In itself


def test_it_loads_nothing_from_anywhere(whole: TuneResult) -> None:
    document = page.render(whole)
    head, _, body = document.partition("</head>")
    assert re.findall(r"<(?:link|img|iframe|object|script src)", document) == []
    assert "plotly.js v" in head
    assert "http" not in body
    assert "<fast>" not in document  # a directory's name is text, never markup
    assert len(document) < 7_000_000  # plotly's script has 4.8 of them
    assert len(body) < 1_000_000


@pytest.mark.parametrize(
    ("grid", "ops", "budget_s", "heads"),
    [
        (GRID, ["read"], 25.0, {"The final", "One parameter at a time", "The search", "Latency"}),
        (GRID, ["read", "write"], 3.0, {"One parameter at a time", "Latency"}),
        ({**GRID, "block_size": [MIB]}, ["write"], 20.0, {"The final", "The search"}),
        ({k: [v] for k, v in DEFAULT._asdict().items()}, ["read"], 5.0, {"Latency"}),
        (GRID, ["read", "write"], 0.05, {"Latency"}),
    ],
)
def test_what_was_not_measured_is_left_out(
    grid: Grid, ops: list[Op], budget_s: float, heads: set[str]
) -> None:
    """A budget too small for a single look drew its page from an empty list: IndexError."""
    document = page.render(search(grid, ops, budget_s)).partition("</head>")[2]
    shown = set(re.findall(r"<h2>(.*?)</h2>", document))
    assert heads | {"The setting", "Everything", "Conditions"} <= shown
    assert ("write" in document.split("<h2>")[0]) is ("write" in ops)
    assert "NaN" not in document and "nan" not in re.sub(r"<script.*?</script>", "", document)


def test_one_round_has_no_spread(whole: TuneResult) -> None:
    """It was said to be 0.0 %, as if the one figure were certain."""
    rounds = {f.setting: list(f.ratios) for f in whole.outcome.finalists}
    try:
        for finalist in whole.outcome.finalists:
            del finalist.ratios[1:]
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.render(whole))
    finally:
        for finalist in whole.outcome.finalists:
            finalist.ratios[:] = rounds[finalist.setting]
    assert "-" in cells and "0.0%" not in cells


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
