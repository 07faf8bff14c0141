"""The generated pages: complete, readable as Markdown, and true to the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdpo.algorithms import ALGORITHMS
from sdpo.config import Config, MonitorConfig
from sdpo.config_reference import configuration, main, troubleshooting
from sdpo.metrics import METRICS
from sdpo.monitor import MONITORS

SETTINGS = [
    (section, key)
    for section, field in Config.model_fields.items()
    for key in field.annotation.model_fields  # type: ignore[union-attr]
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def section(page: str, title: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by their first cell."""
    body = page.split(f"\n## `[{title}]`\n", 1)[1].split("\n## ", 1)[0]
    rows = [cells(line) for line in body.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.parametrize(("name", "key"), SETTINGS)
def test_every_setting_has_type_default_and_meaning(name: str, key: str) -> None:
    kind, default, meaning = section(configuration(), name)[f"`{key}`"]
    assert kind
    assert default
    assert len(meaning) >= 8, f"{name}.{key} has no docstring"


@pytest.mark.parametrize(
    ("name", "key", "kind", "default"),
    [
        ("algo", "name", "text", "required"),
        ("loss", "top_k", 'integer or `"none"` (>= 1)', '`"none"`'),
        ("loss", "divergence", '`"forward_kl"`, `"reverse_kl"`, `"js"`', '`"js"`'),
        ("loss", "alpha", "number (> 0, < 1)", "`0.5`"),
        ("loss", "tail", "true or false", "`true`"),
        ("optim", "betas", "2 x number", "`[0.9, 0.999]`"),
        ("model", "lora_targets", "text or list of text", '`"all-linear"`'),
        ("env", "args", "table", "`{}`"),
    ],
)
def test_types_and_defaults_are_written_as_in_toml(name: str, key: str, kind: str, default: str) -> None:
    assert section(configuration(), name)[f"`{key}`"][:2] == [kind, default]


def test_pipes_and_line_breaks_do_not_break_a_row() -> None:
    row = section(configuration(), "loss")["`divergence`"]
    assert len(row) == 3
    assert r"KL(teacher \|\| student)" in row[2]
    assert r"\n\n" in section(configuration(), "context")["`feedback_template`"][1]


def test_presets_list_what_differs_from_the_defaults_and_only_that() -> None:
    presets = configuration().split("\n## Presets\n", 1)[1]
    for name, algorithm in ALGORITHMS.items():
        body = presets.split(f"\n### `{name}`\n", 1)[1].split("\n### ", 1)[0]
        assert algorithm.summary.replace("*", r"\*") in body
        listed = {cells(line)[0] for line in body.splitlines() if line.startswith("| `")}
        given = {f"`{table}.{key}`" for table, keys in algorithm.preset.items() for key in keys}
        assert listed <= given
    sdpo = presets.split("\n### `sdpo`\n", 1)[1].split("\n### ", 1)[0]
    assert '| `loss.top_k` | `100` | `"none"` |' in sdpo
    assert "loss.alpha" not in sdpo


def test_every_warning_is_explained_with_its_thresholds() -> None:
    page = troubleshooting()
    for code, rule in MONITORS.items():
        body = page.split(f"\n### `{code}`\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
        assert all(text in body for text in ("Warns when: ", "Likely cause: ", "What to do: "))
        for name in rule.settings:
            assert f"`{name} = {MonitorConfig.model_fields[name].default}`" in body
    assert all(f"| `{name}` |" in page for name in METRICS)


def test_no_asterisk_outside_of_code_turns_text_italic() -> None:
    for page in (configuration(), troubleshooting()):
        assert not re.search(r"(?<!\\)\*", re.sub(r"`[^`]*`", "", page))


def test_the_command_prints_either_page(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == configuration()
    main(["--troubleshooting"])
    assert capsys.readouterr().out == troubleshooting()


def test_it_runs_as_a_module() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "sdpo.config_reference"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == configuration()
    assert done.stdout.endswith("|\n")
