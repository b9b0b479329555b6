"""A page of ours as a browser would find it, without a browser; and what holds for all of them."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """What a browser would find: tags with attributes, scripts, and text by section."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.style = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.chips: list[list[tuple[str, str]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def _section(self) -> str:
        return next((a["id"] or "" for t, a in self.open if t == "section"), "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "br":
            self.handle_data("\n")
        if tag not in VOID:
            self.open.append((tag, attributes))
        if tag == "script":
            self.scripts.append((attributes.get("type"), ""))
        elif tag == "tr":
            self.tables.setdefault(self._section(), []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section()][-1].append("")
        elif tag == "p" and attributes.get("class") == "strip":
            self.chips.append([])
        elif self._in_strip() and tag in ("span", "del"):
            self.chips[-1].append(((attributes.get("class") or tag).removeprefix("chip "), ""))

    def _in_strip(self) -> bool:
        return any(t == "p" and a.get("class") == "strip" for t, a in self.open)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1][0] if self.open else ""
        if tag == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
            return
        if tag == "style":
            self.style += data
            return
        self.text += data
        if any(t in ("td", "th") for t, _ in self.open):
            self.tables[self._section()][-1][-1] += data
        if self._in_strip():
            fate, text = self.chips[-1][-1]
            self.chips[-1][-1] = (fate, text + data)

    @property
    def sections(self) -> list[str]:
        return [a["id"] or "" for t, a in self.tags if t == "section"]

    @property
    def figures(self) -> list[dict[str, Any]]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]

    def row(self, section: str, name: str) -> list[str]:
        """Cells of the first row of that name, ordinary spaces only."""
        rows = [[c.replace("\N{NO-BREAK SPACE}", " ") for c in r] for r in self.tables[section]]
        return next(r for r in rows if r[0] == name)[1:]


def check_it_loads_nothing(page: Page) -> None:
    """Nothing from outside is named, and the content security policy allows the scripts inside and no others."""
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "source", "svg"), tag
        assert not {"src", "srcset", "data", "action", "formaction", "poster", "background"} & set(attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert "url(" not in (attributes.get("style") or "")
    assert not re.search(r"url\(|@import|@font-face|https?:", page.style)
    own = [text for kind, text in page.scripts if kind is None and text != get_plotlyjs()]
    assert len(own) == 1
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|WebSocket|import\(|\.src\b|innerHTML|eval\(", own[0])
    policy = next(a["content"] or "" for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    allowed = re.search(r"script-src ([^;]*)", policy)
    assert allowed
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in page.scripts if kind is None]
    assert allowed[1].split() == [f"'sha256-{h}'" for h in hashes]
    assert "default-src 'none'" in policy


def check_figures(page: Page) -> None:
    """plotly knows every property and value of every figure."""

    def plain(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("--"):
            return "#123456"
        if isinstance(value, list):
            return [plain(v) for v in value]
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    for figure in page.figures:
        go.Figure(plain(figure))  # raises on a property or value that plotly does not know


def colours(style: str, dark: bool) -> dict[str, str]:
    roots = re.findall(r":root \{([^}]*)\}", style)
    found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", roots[0]))
    return found | (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", roots[1])) if dark else {})


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
