"""The one HTML file of a report: pictures inside, tables, no script, nothing from elsewhere. Well-formed as XML too."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.report.sheet import Sheet
from bench.report.verdict import Verdict

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --faint: #63636a; --paper: #ffffff; --card: #f5f5f7; --line: #d7d7dc;
  --warn: #8a3b00; --warnback: #fff3e6; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececf0; --faint: #a5a5ad; --paper: #17171a; --card: #222226; --line: #3c3c42; --warn: #ffb877;
    --warnback: #3a2813; --link: #7db8f5; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--paper); margin: 0 auto; max-width: 74rem; padding: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.1rem 0 .3rem; }
p, li { max-width: 56rem; }
ul { margin: .2rem 0; padding-left: 1.3rem; }
a { color: var(--link); }
nav { font-size: .92rem; margin: .8rem 0; }
nav a { margin-right: .9rem; white-space: nowrap; }
.kind { display: inline-block; font-size: .78rem; font-weight: 600; border: 1px solid currentColor; border-radius: 1rem;
  padding: 0 .6rem; color: var(--faint); vertical-align: middle; }
.warn { background: var(--warnback); color: var(--warn); border-left: .3rem solid currentColor; padding: .5rem 1rem;
  border-radius: .3rem; margin: 1rem 0; }
.note { color: var(--faint); font-size: .88rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; font-size: .9rem; margin: 1rem 0;
  background: var(--card); padding: .8rem 1rem; border-radius: .5rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: .5rem 0 1rem; }
figure img { width: 100%; height: auto; background: #fff; border-radius: .5rem; border: 1px solid var(--line);
  display: block; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .85rem; min-width: 30rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 600; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
tr.faint { color: var(--faint); text-decoration: line-through; text-decoration-thickness: 1px; }
tr.faint td:last-child { text-decoration: none; }
summary { cursor: pointer; color: var(--link); font-size: .92rem; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print {
  :root { --ink: #000; --paper: #fff; --card: #fff; --line: #bbb; --faint: #444; --warn: #000; --warnback: #fff; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, summary { display: none; }
  h2 { break-after: avoid; } figure, tr, .warn { break-inside: avoid; }
  .wide { overflow: visible; } table { font-size: 7.5pt; min-width: 0; }
}
"""


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows, for those who do not see it."""

    png: bytes
    alt: str


@dataclass(frozen=True)
class Section:
    """A heading, words, pictures, tables. `folded`: its tables are behind a click where there are pictures."""

    anchor: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    sheets: Sequence[Sheet] = ()
    folded: bool = True


@dataclass(frozen=True)
class Page:
    """A report. `facts`: the head's (name, value); `problems`: what is missing or does not count."""

    title: str
    kind: str
    facts: Sequence[tuple[str, str]]
    problems: Sequence[str]
    verdict: Verdict
    sections: Sequence[Section]

    def html(self) -> str:
        body = [
            f"<h1>{escape(self.title)} <span class='kind'>{escape(self.kind)}</span></h1>",
            self._contents(),
            self._problems(),
            self._verdict(),
            *(_section(section, self.kind) for section in self.sections),
            f"<h2 id='about'>How it was measured</h2>\n{_facts(self.facts)}",
        ]
        return (
            "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8' />\n"
            "<meta name='viewport' content='width=device-width, initial-scale=1' />\n"
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(body)
            + "\n</body>\n</html>\n"
        )

    def _contents(self) -> str:
        links = [("verdict", "Result"), *((one.anchor, one.title) for one in self.sections), ("about", "How")]
        return "<nav>" + " ".join(f"<a href='#{anchor}'>{escape(words)}</a>" for anchor, words in links) + "</nav>"

    def _problems(self) -> str:
        if not self.problems:
            return ""
        return f"<div class='warn'><strong>What is missing, or does not count</strong>{_listed(self.problems)}</div>"

    def _verdict(self) -> str:
        found = ["<h2 id='verdict'>Result</h2>"]
        if self.verdict.caution:
            found.append(f"<p class='warn'>{escape(self.verdict.caution)}</p>")
        for heading, sentences in self.verdict.parts:
            found.append(f"<h3>{escape(heading)}</h3>{_listed(sentences)}")
        return "\n".join(found)


def _section(section: Section, kind: str) -> str:
    found = [f"<h2 id='{section.anchor}'>{escape(section.title)}</h2>"]
    found += [f"<p>{escape(words)}</p>" for words in section.words]
    for picture in section.pictures:
        data = base64.b64encode(picture.png).decode()
        alt = escape(picture.alt, quote=True)
        found.append(f'<figure><img src="data:image/png;base64,{data}" alt="{alt}" /></figure>')
    tables = [_sheet(sheet, kind) for sheet in section.sheets]
    if tables and section.pictures and section.folded:
        found.append(f"<details><summary>The numbers</summary>{''.join(tables)}</details>")
    else:
        found += tables
    return "\n".join(found)


def _sheet(sheet: Sheet, kind: str) -> str:
    note = f"<p class='note'>{escape(sheet.note)}</p>" if sheet.note else ""
    file = f"<p class='note'>As a file: <a href='{escape(sheet.name)}.csv'>{escape(sheet.name)}.csv</a></p>"
    if not sheet.rows:
        return f"<p class='note'>{escape(sheet.title)}: nothing to show.</p>"
    return ("" if sheet.long else sheet.html(kind)) + note + file


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def _listed(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"
