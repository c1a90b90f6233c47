"""The built site in a browser, at the widths of a phone, a laptop and a large screen.

A part of `make stress`. `make docs` builds the site; without it, or without chromium, these are
skipped. A page of the test's own shows each page of the site in a frame, measures it, and chromium
prints what was found.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from documented.pages import ROOT

SITE = ROOT / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stress,  # minutes, and a browser that at times does not answer on a busy machine
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="`make docs` builds the site"),
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here (apt-get install chromium)"),
]

PROBE = """<!doctype html><body><script>
const shown = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border:0;height:900px;width:${width}px`;
  frame.onload = () => {
    const page = frame.contentDocument.documentElement, found = {scrolls: 0, cut: []};
    found.scrolls = page.scrollWidth - page.clientWidth;
    for (const code of page.querySelectorAll("pre > code"))
      if (code.scrollWidth > code.clientWidth + 1) found.cut.push(code.textContent.slice(0, 60));
    frame.remove();
    done(found);
  };
  frame.src = page;
  document.body.append(frame);
});
(async () => {
  const found = {};
  for (const page of PAGES) found[page] = await shown(page, WIDTH);
  const told = document.createElement("pre");
  told.id = "probe";
  told.textContent = JSON.stringify(found);
  document.body.append(told);
})();
</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The site, and the probe's page beside it."""

    probe = b""

    def do_GET(self) -> None:
        if self.path != "/probe":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.probe)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        made.daemon_threads = True
        serving = threading.Thread(target=made.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        serving.join()


@pytest.mark.parametrize("width", [400, 1300, 1900])
def test_no_page_is_wider_than_the_screen(
    width: int, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [str(page.relative_to(SITE)) for page in SITE.rglob("*.html")]
    pages = sorted(page for page in pages if not page.startswith(("assets", "404")))
    probe = PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width))
    monkeypatch.setattr(Handler, "probe", probe.encode())
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=300000",
         f"--window-size={width + 100},1000", "--dump-dom", f"{server}/probe"],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    printed = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert printed, done.stderr[-2000:]
    found = json.loads(unescape(printed[-1]))
    assert set(found) == set(pages)
    assert {page: seen for page, seen in found.items() if seen["scrolls"] > 0} == {}
    if width > 1000:  # on a phone lines of code scroll
        assert {page: seen["cut"] for page, seen in found.items() if seen["cut"]} == {}
