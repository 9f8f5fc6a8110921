"""The frame and style sheet of pages with plots: light, dark, narrow, and policies in color.

Everything is CSS: a page has no script, so that it opens anywhere, also from a mail or an archive.
The ticks in the page's list decide the policies in color (`:has`).

Colors are those of Okabe and Ito (Color Universal Design, 2008), which people distinguish whatever
their color vision, except the yellow, which a white page does not show. Beyond seven, dashes
distinguish lines.
"""

from __future__ import annotations

from html import escape

COLORS = 7
DASHES = ("none", "7 3", "2 3")

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b87d00", "#1c2430")
DARK = ("#4da6e8", "#ff8a4c", "#2fc79b", "#e7a3c8", "#a5dcff", "#f0b73a", "#e6eaf0")


def _colors(values: tuple[str, ...]) -> str:
    return "".join(f"--c{place + 1}:{value};" for place, value in enumerate(values))


STYLE = (
    ":root{color-scheme:light dark;--paper:#fff;--ink:#1c2430;--soft:#566272;--rule:#dfe4ea;"
    "--panel:#f6f8fa;--context:#a9b3bf;--best:#d9efe4;"
    + _colors(LIGHT)
    + "}@media(prefers-color-scheme:dark){:root{--paper:#12161c;--ink:#e6eaf0;--soft:#a2aebd;"
    "--rule:#2b333e;--panel:#1a2028;--context:#5a6675;--best:#17402f;" + _colors(DARK) + "}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1380px;padding:24px 20px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:32px 0 10px}h3{font-size:14px;margin:0 0 6px;font-weight:600}
h3 small{font-weight:400;color:var(--soft);font-size:12px}
p{margin:0 0 10px;color:var(--soft);max-width:90ch;overflow-wrap:anywhere}
.wrap{overflow-x:auto;margin:0 0 14px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
caption{text-align:left;font-weight:600;font-size:14px;padding:0 0 4px}
th,td{padding:3px 9px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
thead th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom;
max-width:96px;line-height:1.25}
th small,td small{display:block;font-weight:400;font-size:11px;color:var(--soft)}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper);font-weight:400;
min-width:16ch;max-width:26ch;white-space:normal;overflow-wrap:anywhere;color:var(--ink)}
@media(max-width:900px){table{font-size:12px}th,td{padding:3px 5px}}
td.best{background:var(--best);font-weight:700}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,540px),1fr));gap:14px}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:14px}
figure{margin:0;padding:12px 14px;background:var(--panel);border-radius:8px;min-width:0}
figcaption{color:var(--soft);font-size:13px;margin-top:4px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--rule);fill:none}.tick{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.faint{fill:none;stroke-width:1.2;stroke-dasharray:4 3;opacity:.75}
.ground{fill:var(--context);opacity:.28;stroke:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;
font-size:13px}
.legend svg,.chip svg{display:inline-block;width:22px;height:8px;margin-right:6px;
vertical-align:middle}
.legend .block{background:var(--context);opacity:.4;display:inline-block;width:22px;height:9px;
margin-right:6px}
"""
    + "".join(
        f".line.c{n},.faint.c{n}{{stroke:var(--c{n})}}i.c{n}{{background:var(--c{n})}}"
        for n in range(1, COLORS + 1)
    )
    + "".join(
        f".line.d{place}{{stroke-dasharray:{dash}}}" for place, dash in enumerate(DASHES) if place
    )
)
"""For every page with plots."""

PICKING = """
.list{position:sticky;top:0;z-index:2;background:var(--paper);border-bottom:1px solid var(--rule);
padding:8px 0;margin:6px 0 0;display:flex;flex-wrap:wrap;gap:4px 6px;align-items:center}
.chip{font-size:13px;border:1px solid var(--rule);border-radius:999px;padding:1px 10px;
cursor:pointer;color:var(--soft);max-width:34ch;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.chip input,.every input{position:absolute;opacity:0;pointer-events:none}
.chip:has(:focus-visible){outline:2px solid var(--c1)}
.chip:has(:checked){color:var(--ink);border-color:var(--own)}
.chip:hover{border-color:var(--soft)}
.one{--own:var(--context);--on:0;--dash:none}
.line.one{stroke:var(--own);stroke-dasharray:var(--dash);opacity:calc(.5 + .5*var(--on));
stroke-width:calc(.9px + 1.1px*var(--on))}
.row{display:grid;grid-template-columns:minmax(6ch,11ch) 1fr 9ch;gap:8px;align-items:center;
font-size:12.5px;line-height:20px;cursor:pointer}
.row.wide{grid-template-columns:minmax(6ch,11ch) 1fr 15ch}
.row.long{grid-template-columns:1fr auto;gap:0 8px;margin:0 0 3px}
.row.long b{white-space:normal;overflow-wrap:anywhere;line-height:16px}
.row.long u{grid-row:2;grid-column:1/3;margin:1px 0 2px}
.row b{font-weight:400;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.row.best b,.row.best s{font-weight:700}
.row s{text-decoration:none;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.row u{text-decoration:none;display:block;position:relative;height:11px}
.row u i{position:absolute;inset:0 auto 0 0;background:var(--own);border-radius:2px;
opacity:calc(.6 + .4*var(--on))}
.row u q{position:absolute;top:4.5px;height:2px;background:var(--ink);quotes:none}
.row.cut u i{-webkit-mask:linear-gradient(90deg,#000 72%,#0000 76% 80%,#000 84%);
mask:linear-gradient(90deg,#000 72%,#0000 76% 80%,#000 84%)}
.row:hover{background:var(--rule)}
.none{margin:2px 0;font-size:12.5px;line-height:1.45}.none strong{color:var(--ink)}
.tables{display:flex;flex-wrap:wrap;gap:6px 40px}.tables .wrap{max-width:100%}
tr.one th:first-child{border-left:4px solid var(--own);padding-left:8px}
thead th:first-child{padding-left:12px}
"""
"""For a page with a choice of colored elements: all elements of the class `one`."""


def document(title: str, body: str, *, style: str = "") -> str:
    """A whole page under its title: this style sheet, more CSS if needed, and the body."""
    name = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}</title><style>{STYLE}{style}</style></head><body>"
        f"<h1>{name}</h1>{body}</body></html>\n"
    )


def picked(count: int) -> str:
    """Rules for a number of places: `pN` is in its color where `kN`, or all, is ticked.

    The place under the pointer is in color as well. A browser that is too old for that colors all.
    """
    rules: list[str] = [PICKING]
    for place in range(count):
        color, dash = mark(place)
        on = f"{{--own:var(--c{color});--on:1;--dash:{DASHES[dash]}}}"
        rules.append(
            f"body:has(#k{place}:checked) .p{place},body:has(#all:checked) .p{place},"
            f"body:has(.p{place}:hover) .p{place}{on}"
            f"@supports not selector(:has(a)){{.p{place}{on}}}"
            f"body:not(:has(#k{place}:checked)):not(:has(#all:checked)) .legend .p{place}"
            "{display:none}"
        )
    return "".join(rules)


def mark(place: int) -> tuple[int, int]:
    """Color (from 1) and dash of this place."""
    return place % COLORS + 1, place // COLORS % len(DASHES)
