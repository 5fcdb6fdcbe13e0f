"""Draw the panels of docs/monitoring/grafana.json from what Prometheus answers to their queries, as a page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent.parent / "docs" / "monitoring" / "grafana.json"
COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#b877d9", "#f2cc0c", "#8f3bb8", "#37872d", "#1f60c4", "#c4162a")
# Of Grafana's grid: 24 columns, and rows of 30 pixels with 8 between.
COLUMN, ROW, GAP = 50, 38, 8
AXIS = 62


class Series(NamedTuple):
    """One line of a panel. points: Unix time and value."""

    name: str
    points: list[tuple[float, float]]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    return found


def page(answers: list[tuple[dict[str, Any], list[Series]]]) -> str:
    """Return the page. answers: each panel with its series."""
    drawn = "".join(_panel(panel, series) for panel, series in answers)
    height = max((panel["gridPos"]["y"] + panel["gridPos"]["h"]) * ROW for panel, _ in answers)
    style = (
        "body{margin:0;background:#f4f5f5;font:12px system-ui,sans-serif;color:#24292e}"
        "section{position:absolute;background:#fff;border:1px solid #e4e5e8;border-radius:2px;overflow:hidden}"
        "h2{font-size:13px;font-weight:500;margin:6px 10px}"
        "b{display:block;text-align:center;font-size:38px;margin-top:22px;color:#37872d}"
        "ul{list-style:none;margin:2px 10px;padding:0;display:flex;gap:14px}"
        "i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dashboard</title><style>{style}</style>"
        f"<main style='position:relative;width:{24 * COLUMN + GAP}px;height:{height + GAP}px'>{drawn}</main></html>"
    )


def _panel(panel: dict[str, Any], series: list[Series]) -> str:
    place = panel["gridPos"]
    width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
    unit = panel["fieldConfig"]["defaults"]["unit"]
    body = _stat(series, unit) if panel["type"] == "stat" else _lines(series, unit, width, height - 56)
    left, top = place["x"] * COLUMN + GAP, place["y"] * ROW + GAP
    where = f"left:{left}px;top:{top}px;width:{width}px;height:{height}px"
    return f"<section style='{where}'><h2>{escape(panel['title'])}</h2>{body}</section>"


def _stat(series: list[Series], unit: str) -> str:
    return f"<b>{escape(_shown(series[0].points[-1][1], unit)) if series else 'No data'}</b>"


def _lines(series: list[Series], unit: str, width: int, height: int) -> str:
    points = [point for each in series for point in each.points]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = max(value for _, value in points) * 1.08 or 1.0

    def x(at: float) -> float:
        return AXIS + (width - AXIS - 12) * (at - first) / max(last - first, 1)

    def y(value: float) -> float:
        return 6 + (height - 24) * (1 - value / top)

    marks = "".join(
        f"<line x1={AXIS} x2={width - 12} y1={y(top * part):.1f} y2={y(top * part):.1f} stroke='#e9ebee'/>"
        f"<text x={AXIS - 6} y={y(top * part) + 4:.1f} text-anchor=end fill='#5b6068'>{_shown(top * part, unit)}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    marks += "".join(
        f"<text x={x(first + (last - first) * part):.1f} y={height - 2} text-anchor=middle fill='#5b6068'>"
        f"{(last - first) * part:.0f} s</text>"
        for part in (0.0, 0.25, 0.5, 0.75, 0.97)
    )
    lines = names = ""
    for colour, each in zip(COLOURS, series, strict=False):
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in each.points)
        lines += f"<polyline points='{path}' fill=none stroke='{colour}' stroke-width=1.6 />"
        names += f"<li><i style='background:{colour}'></i>{escape(each.name)}</li>"
    return f"<svg width={width} height={height}>{marks}{lines}</svg><ul>{names}</ul>"


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    number = f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"
    return f"{number} s" if unit == "s" else f"{number}/s" if unit == "ops" else number
