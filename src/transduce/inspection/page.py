"""An HTML page in one file: no script, style, font or picture comes from elsewhere, and all text is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

# Nothing may be fetched, even if a bug or a hostile sentence put an address into the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

STYLE = """
:root {
  color-scheme: light dark;
  --surface: #fcfcfb; --raised: #ffffff; --text: #1c1c1a; --soft: #62615c; --line: #dedcd5; --grid: #ebe9e3;
  --one: #2a6fdb; --two: #d9622b; --three: #2e9e6b; --four: #8a5cc9; --heat: #1f5fc4; --good: #1a7f4b; --bad: #b3392f;
}
@media (prefers-color-scheme: dark) { :root {
  --surface: #171715; --raised: #1f1f1d; --text: #eceae4; --soft: #a3a199; --line: #3a3935; --grid: #2b2a27;
  --one: #6aa5ff; --two: #f08a54; --three: #4fc48d; --four: #b794f0; --heat: #7db1ff; --good: #5cc78e; --bad: #f0857b;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 22px 0 8px; }
p { margin: 8px 0; max-width: 90ch; }
.soft, figcaption, th, dt, summary { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: var(--one); text-decoration: none; } a:hover { text-decoration: underline; }
code, .mono { font: 12.5px/1.5 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace; }
code { overflow-wrap: anywhere; } td code { white-space: nowrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.tile b { display: block; font-size: 23px; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
figcaption { font-size: 13px; min-height: 20px; } figcaption b { color: var(--text); font-weight: 600; }
figure > svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 500; font-size: 13px; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl.sample { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0; padding: 12px 0;
  border-bottom: 1px solid var(--line); }
dl.sample dt { font-size: 13px; } dl.sample dd { margin: 0; }
ins { text-decoration: none; background: color-mix(in srgb, var(--three) 22%, transparent); border-radius: 3px; }
del { text-decoration: none; background: color-mix(in srgb, var(--two) 22%, transparent); border-radius: 3px; }
details { margin: 10px 0; } summary { cursor: pointer; }
select { font: inherit; font-size: 13px; color: var(--text); background: var(--surface); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 6px; margin: 0 10px 0 4px; }
.heat svg, .heat figcaption b, .heat .value { display: block; } .heat .value { min-height: 20px; }
.heat rect { fill: var(--heat); } .heat .frame { fill: none; stroke: var(--line); }
.heat svg text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: var(--text); }
.heats { display: flex; flex-wrap: wrap; gap: 16px; align-items: flex-start; margin: 12px 0; }
.heats figure { max-width: 100%; }
@media print { nav { display: none; } figure, .tile { break-inside: avoid; } }
"""


def escape(text: object) -> str:
    """Text for HTML and for attribute values in double quotes.

    >>> escape('<b> & "c"')
    '&lt;b&gt; &amp; &quot;c&quot;'
    """
    # A lone surrogate (a file name that is not UTF-8) cannot be written as UTF-8.
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def page(title: str, body: str, *, script: str = "") -> str:
    """A whole document around `body`, which is HTML; `script` is JavaScript."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: frozenset[int] = frozenset()) -> str:
    """A table of escaped cells; the columns in `numbers` are set right. A cell that is `Html` stands as it is."""
    rows = list(rows)

    def line(tag: str, cells: Sequence[object]) -> str:
        def cell(i: int, value: object) -> str:
            kind = ' class="n"' if i in numbers else ""
            return f'<{tag}{kind} dir="auto">{value if isinstance(value, Html) else escape(value)}</{tag}>'

        return "<tr>" + "".join(cell(i, value) for i, value in enumerate(cells)) + "</tr>"

    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(line("td", row) for row in rows)}</tbody></table></div>'


class Html(str):
    """A piece of HTML, so that it is not escaped again."""

    __slots__ = ()


def embedded(value: Any, *, name: str) -> str:
    """JSON inside a page, under the class `name`: no text in it can end its element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" class="{escape(name)}">{text}</script>'
