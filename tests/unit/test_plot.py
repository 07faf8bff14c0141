"""Figures: that they hold what they were given, and what is refused."""

from __future__ import annotations

import math
import re
import struct
import sys
from pathlib import Path

import pytest

from sdpo.errors import CheckpointError, ConfigError, MissingDependencyError
from sdpo.plot import Point, learning_curves

CURVES: dict[str, list[Point]] = {
    "SDPO": [(0, 0.35, 0.3, 0.4), (6400, 0.55, 0.5, 0.6), (12800, 0.76, 0.72, 0.8)],
    "GRPO <mean>": [(0, 0.35, 0.3, 0.4), (6400, 0.43, 0.4, 0.46), (12800, 0.57, math.nan, math.nan)],
}


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("altair", reason="needs the extra `report`")
    pytest.importorskip("vl_convert", reason="needs the extra `report`")


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "curve.png"
    learning_curves(CURVES, path, "rollouts", "success", "Lab")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000
    assert height > 600


def test_svg_has_titles_names_bands_and_points(tmp_path: Path) -> None:
    learning_curves(CURVES, tmp_path / "curve.svg", "rollouts", "success rate", "SDPO and GRPO")
    text = (tmp_path / "curve.svg").read_text()
    for expected in ("rollouts", "success rate", "SDPO and GRPO", ">SDPO<", "GRPO &lt;mean&gt;"):
        assert expected in text
    assert len(re.findall(r'class="[^"]*mark-area', text)) >= 2
    assert len(re.findall(r'aria-roledescription="point"', text)) == 6


def test_points_without_a_mean_and_series_without_a_band_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    series: dict[str, list[Point]] = {"one seed": [(0, 0.1, math.nan, math.nan), (1, math.nan, 0.1, 0.2)]}
    learning_curves(series, tmp_path / "curve.svg", "x", "y", "t")
    text = (tmp_path / "curve.svg").read_text()
    assert "mark-area" not in text
    assert len(re.findall(r'aria-roledescription="point"', text)) == 1


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curve.jpg \(the name must end in .png or .svg"):
        learning_curves(CURVES, tmp_path / "curve.jpg", "x", "y", "t")
    with pytest.raises(ConfigError, match="nothing to draw"):
        learning_curves({"a": []}, tmp_path / "curve.png", "x", "y", "t")
    with pytest.raises(ConfigError, match="8 series"):
        learning_curves({str(i): [(0, 0, 0, 0)] for i in range(8)}, tmp_path / "curve.png", "x", "y", "t")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not write"):
        learning_curves(CURVES, tmp_path / "file" / "curve.png", "x", "y", "t")


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'sdpo\[report\]'"):
        learning_curves(CURVES, tmp_path / "curve.png", "x", "y", "t")
