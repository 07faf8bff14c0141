"""Curves with bands, as PNG or SVG, by altair (extra `report`).

Not covered: interactive charts and anything but lines over steps, attempts or rollouts; reports draw their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpo.errors import CheckpointError, ConfigError, MissingDependencyError, boundary

__all__ = ["Point", "learning_curves"]

Point = tuple[float, float, float, float]  # x, mean, low, high

# Distinguishable in colour blindness and in grey print, together with the dash patterns.
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [10, 4], [3, 5], [1, 3]]


def learning_curves(
    series: Mapping[str, Sequence[Point]], path: str | Path, x_label: str, y_label: str, title: str
) -> None:
    """Draw one line with its band for each series.

    Args:
        series: for each name (x, mean, low, high) points; a NaN mean leaves the point out, a NaN bound the band.
        path: ends in .png or .svg.

    Raises:
        ConfigError: no points, too many series, or another ending.
        MissingDependencyError: the extra `report` is not installed.
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"cannot draw {path.name}", hint="the name must end in .png or .svg")
    if len(series) > len(_COLOURS):
        raise ConfigError(f"{len(series)} series in one figure", hint=f"at most {len(_COLOURS)} can be told apart")
    rows: list[dict[str, Any]] = [
        {"series": name, "x": x, "mean": mean, "low": low, "high": high}
        for name, points in series.items()
        for x, mean, low, high in points
        if math.isfinite(mean)
    ]
    if not rows:
        raise ConfigError(f"nothing to draw in {path.name}", hint="every series is empty")
    try:
        import altair as alt
        import vl_convert  # noqa: F401  (altair needs it to save, and says so only then)
    except ImportError as exc:
        raise MissingDependencyError("drawing figures", extra="report") from exc
    names = list(series)
    x = alt.X("x:Q", title=x_label, scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(tickCount=7))
    colour = alt.Color("series:N", title=None, scale=alt.Scale(domain=names, range=_COLOURS[: len(names)]))
    dash = alt.StrokeDash("series:N", title=None, scale=alt.Scale(domain=names, range=_DASHES[: len(names)]))
    banded = [row for row in rows if math.isfinite(row["low"]) and math.isfinite(row["high"])]
    line = alt.Chart(alt.Data(values=rows)).encode(x=x, color=colour, strokeDash=dash)
    layers = [
        line.mark_line(strokeWidth=2.5).encode(y=alt.Y("mean:Q", title=y_label)),
        line.mark_point(filled=True, size=40, opacity=1).encode(y="mean:Q"),
    ]
    if banded:
        band = alt.Chart(alt.Data(values=banded)).mark_area(opacity=0.18)
        layers.insert(0, band.encode(x=x, y=alt.Y("low:Q", title=y_label), y2="high:Q", color=colour))
    chart = (
        alt.layer(*layers)
        .properties(width=520, height=320, title=title)
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=12, titleFontSize=13, titleFontWeight="normal", gridColor="#e8e8e8")
        .configure_title(fontSize=15, anchor="start")
        .configure_legend(
            labelFontSize=12,
            labelLimit=240,
            symbolType="stroke",
            symbolOpacity=1,
            symbolStrokeWidth=2.5,
            symbolSize=400,
        )
    )
    with boundary(f"write {path}", CheckpointError):
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.save(str(path), scale_factor=2.0)
