"""A bar chart as SVG, drawn by hand: one group of horizontal bars per workload."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

WIDTH, LABELS, VALUES = 860, 170, 60  # pixels: all, left of the bars, right of the longest
BAR, GAP, TITLE = 16, 5, 30
OURS_COLOUR, PEER_COLOUR, TEXT_COLOUR = "#2563eb", "#94a3b8", "#1e293b"


def bars_svg(groups: Mapping[str, Mapping[str, float]]) -> str:
    """`groups`: title -> name -> value. Names that begin with `loraplex` are ours."""
    longest = max((value for bars in groups.values() for value in bars.values()), default=1.0)
    parts: list[str] = []
    y = 0
    for title, bars in groups.items():
        y += TITLE
        parts.append(_text(0, y - 10, title + ", output tokens/s", bold=True))
        for name, value in bars.items():
            parts += _bar(y, name, value, (WIDTH - LABELS - VALUES) * value / longest)
            y += BAR + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + GAP}" viewBox="-8 0 {WIDTH} {y + GAP}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    background = f'<rect x="-8" y="0" width="{WIDTH}" height="{y + GAP}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _bar(y: int, name: str, value: float, width: float) -> list[str]:
    colour = OURS_COLOUR if name.startswith("loraplex") else PEER_COLOUR
    return [
        _text(0, y + BAR - 4, name),
        f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
        _text(LABELS + width + 6, y + BAR - 4, f"{value:.0f}"),
    ]


def _text(x: float, y: float, content: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT_COLOUR}"{weight}>{escape(content)}</text>'
