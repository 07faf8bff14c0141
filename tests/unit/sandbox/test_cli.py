"""`sdpo sandbox check` and `serve`, and what the README shows."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from typer.testing import CliRunner

from sdpo.errors import ConfigError
from sdpo_sandbox.attacks import ATTACKS
from sdpo_sandbox.cli import app
from sdpo_sandbox.levels import Level, offer


def test_check_runs_the_attacks() -> None:
    outcome = CliRunner().invoke(app, ["check"])
    assert str(Level.FULL) in outcome.output
    if offer(Level.FULL):
        assert outcome.exit_code == 0, outcome.output
        assert f"{len(ATTACKS)} of {len(ATTACKS)} attacks stopped" in outcome.output


def test_an_unknown_level_suggests_the_known_ones() -> None:
    outcome = CliRunner().invoke(app, ["check", "--level", "landlok+seccomp"])
    assert isinstance(outcome.exception, ConfigError)
    assert "did you mean landlock+seccomp" in str(outcome.exception)


def test_help_says_how_it_binds() -> None:
    outcome = CliRunner().invoke(app, ["serve", "--help"])
    assert "127.0.0.1" in outcome.output
    assert "SDPO_SANDBOX_TOKEN" in outcome.output


def test_the_example_of_the_readme() -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / "sandbox" / "README.md").read_text()
    start, end = text.index("    import asyncio"), text.index("    asyncio.run(main())")
    code = textwrap.dedent(text[start:end]) + "asyncio.run(main())\n"
    env = {"PYTHONPATH": f"{root}:{root / 'sandbox'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "ok 42\n\nwrong: 6\n", done.stderr


def test_the_readme_counts_the_attacks() -> None:
    text = (Path(__file__).resolve().parents[3] / "sandbox" / "README.md").read_text()
    assert f"runs {len(ATTACKS)} attacks" in text
    assert f"Stops all {len(ATTACKS)} attacks" in text
