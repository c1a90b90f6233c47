"""Style sheet and script of the page."""

from __future__ import annotations

# Ramps from little to much: towards ink on paper, towards light on a dark screen. Reads are blue
# and writes orange everywhere; hue tells the direction, lightness the amount.
_LIGHT = {
    "read": "#eef4fc #d8e7f8 #bcd6f3 #98c0ec #6fa5e2 #4788d3 #2a6cbc #19539b #0e3c76",
    "write": "#fdf3e9 #fbe4cd #f8d0a8 #f2b67b #e8974c #d67a28 #b85f14 #934909 #6c3505",
}
_DARK = {
    "read": "#18202b #1b2a3d #1f3854 #25496f #2d5f93 #3c7abb #5a98d8 #86b8ea #bcdaf8",
    "write": "#26201a #33281c #46321d #5f401c #80521b #a76a1f #cf8833 #eaab63 #fad3a4",
}

# Lines are thin: their ramps begin where they can be told from the card.
_LIGHT_LINES = {
    "read": "#9cc3ee #74a8e2 #4c8bd2 #2f70bd #1b5499 #0e3c76",
    "write": "#f0b884 #e39a54 #d07d30 #b5621a #944b0d #6c3505",
}
_DARK_LINES = {
    "read": "#2f5a8a #3c75b3 #5691cf #7caee2 #a5caf0 #d3e6fb",
    "write": "#7a4d1c #a06826 #c48438 #dea056 #efbf88 #fbdfbd",
}


def _ramps(ramps: dict[str, str], of: str = "") -> str:
    return "".join(
        f"--{op}{of}{step}:{colour};"
        for op, colours in ramps.items()
        for step, colour in enumerate(colours.split())
    )


def _classes() -> str:
    rules = []
    for op in ("read", "write"):
        for step in range(9):
            rules.append(f".{op}{step}{{fill:var(--{op}{step});background:var(--{op}{step})}}")
        for step in range(6):
            rules.append(f".{op}line{step}{{stroke:var(--{op}line{step})}}")
            rules.append(f".{op}dot{step}{{fill:var(--{op}line{step})}}")
    rules += [f".on{step}{{fill:var(--{'over' if step > 4 else 'under'})}}" for step in range(9)]
    return "".join(rules)


STYLE = (
    """
:root{--page:#f7f7f5;--card:#fff;--ink:#1d1d1f;--quiet:#6a6a70;--rule:#e3e3df;--grid:#ecece8;
--under:#1d1d1f;--over:#fff;--void:#f0f0ed;--read:#2a6cbc;--write:#c0630f;--other:#8b8b92;
--chosen:#1d1d1f;"""
    + _ramps(_LIGHT)
    + _ramps(_LIGHT_LINES, "line")
    + """}
@media (prefers-color-scheme:dark){:root{--page:#121214;--card:#1b1b1e;--ink:#ececf0;
--quiet:#9a9aa2;--rule:#2e2e33;--grid:#29292d;--under:#dcdce2;--over:#0f0f11;--void:#202024;
--read:#6ba8e8;--write:#e59a4a;--other:#85858d;--chosen:#fff;"""
    + _ramps(_DARK)
    + _ramps(_DARK_LINES, "line")
    + """}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:48px 24px 64px}
header{margin-bottom:8px}
.eyebrow{margin:0 0 10px;color:var(--quiet);font-size:13px;overflow-wrap:anywhere}
h1{margin:0;font-size:32px;line-height:1.2;letter-spacing:-.02em;font-weight:650}
h2{margin:0;font-size:19px;letter-spacing:-.01em;font-weight:620}
.verdict{margin:10px 0 0;font-size:17px;color:var(--quiet);max-width:70ch}
.figures{display:flex;flex-wrap:wrap;gap:16px 48px;margin-top:24px}
.figure{color:var(--quiet)}
.figure span{display:block;font-size:13px}
.figure b{font-size:44px;line-height:1.1;font-weight:650;letter-spacing:-.03em;color:var(--ink)}
.figure small{display:block;font-size:13px}
.figure.read b{color:var(--read)}.figure.write b{color:var(--write)}
section{margin-top:52px}
.lead{margin:4px 0 16px;color:var(--quiet);max-width:78ch}
.card,pre{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px;
margin:0}
.pair{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:16px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
.maps{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,310px),1fr));gap:16px}
figcaption{font-size:13px;color:var(--quiet);margin-bottom:10px}
pre{font:13px/1.5 ui-monospace,"SF Mono",Menlo,"DejaVu Sans Mono",monospace;overflow:auto}
.wide{overflow-x:auto}.wide svg{min-width:640px}
svg{display:block;width:100%;height:auto;overflow:visible}
table{border-collapse:collapse;width:100%}
th{font-weight:400;text-align:left}
td{text-align:right;white-space:nowrap}
th,td{padding:6px 0 6px 16px;border-top:1px solid var(--rule)}
th{padding-left:0}
tr:first-child td{border:0;color:var(--quiet);font-size:13px}
.quiet{color:var(--quiet)}
.setting{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:8px 16px;
border-collapse:separate;border-spacing:0}
.changed td:nth-child(2){font-weight:650}
.latency{margin-top:12px;font-size:13px}
.latency th i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
.latency i.read{background:var(--read)}.latency i.write{background:var(--write)}
.latency i.other{background:var(--other)}
.all{font-size:13px;margin-top:12px}
summary{cursor:pointer;color:var(--quiet)}
.ramp{display:flex;align-items:center;gap:3px;color:var(--quiet);font-size:13px;margin:10px 0 22px}
.ramp i{width:22px;height:10px;border-radius:2px}
.ramp i:first-of-type{margin-left:6px}.ramp i:last-of-type{margin-right:6px}
footer{margin-top:52px;color:var(--quiet);font-size:13px}
footer h2{color:var(--ink)}
footer ul{padding-left:18px;margin:8px 0 0;overflow-wrap:anywhere}
text{font-size:12px;fill:var(--ink)}
.tick,.axis{fill:var(--quiet)}
.middle{text-anchor:middle}.end{text-anchor:end}
.grid{stroke:var(--grid)}.zero{stroke:var(--quiet)}
.void{fill:var(--void)}
.frame{fill:none;stroke:var(--chosen);stroke-width:2}
.line{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.line.chosen{stroke-width:3.5}.label.chosen{font-weight:650}
.leader{fill:none;stroke-width:1;opacity:.7}
.dot{stroke:var(--card);stroke-width:1.5}
.hit{fill:transparent}
.strip.chosen{font-weight:650}
.round{fill:var(--other);opacity:.55}.round.chosen{fill:var(--ink);opacity:.7}
.span{stroke:var(--ink);stroke-width:4;opacity:.28}
.median{stroke:var(--ink);stroke-width:2}
.area{stroke-width:1.5}
.area.read{fill:var(--read);stroke:var(--read);fill-opacity:.22}
.area.write{fill:var(--write);stroke:var(--write);fill-opacity:.22}
.area.other{fill:var(--other);stroke:var(--other);fill-opacity:.14}
.middle-mark{stroke-dasharray:3 3}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--page);padding:5px 9px;
border-radius:6px;font-size:13px;max-width:360px;z-index:1}
[data-tip]:hover .dot{r:4.5}
@media (max-width:720px){.pair{grid-template-columns:minmax(0,1fr)}h1{font-size:25px}
main{padding:28px 16px 48px}}
@media print{body{background:#fff}}
"""
    + _classes()
)

# Hints beside the pointer. Everything they say is in the tables too.
SCRIPT = """
const tip=document.getElementById('tip');
document.addEventListener('pointermove',event=>{
  const at=event.target.closest&&event.target.closest('[data-tip]');
  tip.hidden=!at;
  if(!at)return;
  tip.textContent=at.dataset.tip;
  const box=tip.getBoundingClientRect();
  const x=Math.min(event.clientX+14,innerWidth-box.width-8);
  const y=event.clientY+18+box.height>innerHeight?event.clientY-box.height-12:event.clientY+18;
  tip.style.left=x+'px';tip.style.top=y+'px';
});
"""
