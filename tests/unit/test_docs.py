"""The documentation says what the code does: generated pages, links, the README's example and commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in ROOT.rglob("*.md") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts))


@pytest.mark.parametrize(("page", "flags"), [("configuration", []), ("troubleshooting", ["--troubleshooting"])])
def test_generated_pages_are_current(page: str, flags: list[str]) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "sdpo.config_reference", *flags], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout == (ROOT / "docs" / f"{page}.md").read_text(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target and "models" not in page.parts:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readmes_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdpo import load_env

    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "doubles.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    env = load_env("doubles.py:Doubles")
    task = env.tasks("train")[4]
    assert env.grade(task, " 8\n").reward == 1.0
    assert "not the sum" in env.grade(task, "4 + 4 = 8").feedback


def test_the_readmes_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile
    from typer.main import get_command

    from sdpo.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    called = set(re.findall(r"^    sdpo (\w+)", text, re.MULTILINE))
    assert called
    assert called <= known
