"""The command line as a user meets it: help at once, one clear line for a mistake, exit codes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import byte_tokenizer, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LAB = str(ROOT / "recipes" / "lab" / "sdpo.toml")
SMALL = [
    *("--train.steps", "2", "--train.prompts_per_step", "4", "--train.rollouts_per_prompt", "4"),
    *("--eval.tasks", "16", "--eval.every", "2"),
]


def sdpo(*arguments: str, cwd: Path | None = None, uid: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from sdpo.cli import main; main()", *arguments],
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}:{ROOT / 'sandbox'}", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        user=uid,
    )


def one_line(run: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The message of a refused command: one line, no traceback."""
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("sdpo: ")]
    assert len(lines) == 1, run.stderr
    return lines[0]


def test_help_is_quick_and_loads_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['sdpo', '--help']\nfrom sdpo.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    script += (
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'scipy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    assert "train" in run.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5, "CPU seconds"


def test_train_eval_export_from_the_shell(tmp_path: Path) -> None:
    run = sdpo("train", LAB, *SMALL, "--run.dir", str(tmp_path / "run"))
    assert run.returncode == 0, run.stderr
    assert f"2 steps in {tmp_path / 'run'}" in run.stdout
    assert "step 2/2" in run.stderr
    newest = tmp_path / "run" / "checkpoints" / "000002"
    evaluated = sdpo("eval", LAB, "--checkpoint", str(newest), "--out", str(tmp_path / "e.json"), "--eval.tasks", "16")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "avg@1" in evaluated.stdout
    logged = json.loads((tmp_path / "run" / "evals.jsonl").read_text().splitlines()[-1])
    assert json.loads((tmp_path / "e.json").read_text())["success"] == logged["success"]
    exported = sdpo("export", str(newest), str(tmp_path / "plain"))
    assert exported.returncode == 0, exported.stderr
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "plain").num_parameters() > 100_000
    assert "exists already" in one_line(sdpo("export", str(newest), str(tmp_path / "plain")), 1)


def test_dry_run_prints_the_resolved_settings_and_each_deviation(tmp_path: Path) -> None:
    run = sdpo("train", LAB, "--dry-run", "--optim.lr", "1e-4", "--run.dir", str(tmp_path / "run"))
    assert run.returncode == 0, run.stderr
    assert "lr = 0.0001" in run.stdout
    assert "# optim.lr = 0.0001, where sdpo has 1e-05" in run.stdout
    assert "12,800 rollouts in all" in run.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optim.learning_rate", "1"], "unknown setting optim.learning_rate"),
        (["--optim.lr", "fast"], "optim.lr = 'fast'"),
        (["--algo.name", "spdo"], "did you mean sdpo"),
        (["--env.name", "lba"], "no environment named 'lba' (did you mean lab?)"),
        (["--env.args.sead", "1"], "environment 'lab'"),
        (["--model.path", "/nowhere/at/all"], "load model.path = '/nowhere/at/all'"),
        (["--env.name", "json:loads"], "'json:loads' is no environment"),
        (["--model.device", "gpu"], "use model.device = 'gpu'"),
        (["--eval.split", "dev"], "no split 'dev'"),
        (["--loss.granularity", "token"], 'loss.granularity = "token" needs loss.divergence = "reverse_kl"'),
        (["--sampling.max_prompt_tokens", "2"], "exceed sampling.max_prompt_tokens = 2"),
        (["optim.lr=3"], "cannot read 'optim.lr=3'"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in one_line(sdpo("train", LAB, "--run.dir", str(tmp_path / "run"), *arguments))


def test_a_missing_recipe_and_a_broken_one(tmp_path: Path) -> None:
    assert "nothing.toml" in one_line(sdpo("train", "nothing.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[algo\nname = 3")
    assert "broken.toml" in one_line(sdpo("train", str(broken)))


def test_debug_shows_the_traceback() -> None:
    run = sdpo("train", "nothing.toml", "--debug")
    assert run.returncode != 0
    assert "Traceback" in run.stderr


def test_an_existing_run_is_refused_then_resumed_or_overwritten(tmp_path: Path) -> None:
    run_dir = ["--run.dir", str(tmp_path / "run")]
    assert sdpo("train", LAB, *SMALL, *run_dir).returncode == 0
    assert "--run.resume" in one_line(sdpo("train", LAB, *SMALL, *run_dir))
    assert "optim.lr" in one_line(sdpo("train", LAB, *SMALL, *run_dir, "--run.resume", "--optim.lr", "0.5"))
    resumed = sdpo("train", LAB, *SMALL, *run_dir, "--run.resume", "--train.steps", "3")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 2" in resumed.stderr
    assert sdpo("train", LAB, *SMALL, *run_dir, "--run.overwrite").returncode == 0
    repeated = sdpo("train", str(tmp_path / "run" / "config.toml"), "--run.dir", str(tmp_path / "again"))
    assert repeated.returncode == 0, repeated.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_an_unwritable_folder(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    # Everything is imported as root: another user may not be able to read the interpreter's libraries.
    code = "import os; from sdpo.cli import main; import sdpo.train, rich.traceback; os.seteuid(65534); main()"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, "train", LAB, "--run.dir", str(locked / "run")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}:{ROOT / 'sandbox'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"run.dir = {locked / 'run'}" in one_line(run)


def test_models_that_cannot_chat_are_refused_in_one_line(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    arguments = ["--model.path", str(tmp_path / "base"), "--run.dir", str(tmp_path / "run")]
    assert "has no chat template" in one_line(sdpo("train", LAB, *arguments))
    arguments += ["--context.system", "You know the answer."]
    with_system = ["--context.system", "You know.", "--run.dir", str(tmp_path / "run2")]
    assert "refuses the roles [system user]" in one_line(sdpo("train", LAB, *with_system))


def test_a_tokenizer_that_pads_with_its_end_token_trains(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(pad="<|end|>")
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run = sdpo("train", LAB, *SMALL, "--model.path", str(tmp_path / "model"), "--run.dir", str(tmp_path / "run"))
    assert run.returncode == 0, run.stderr


def test_doctor_and_environments() -> None:
    doctor = sdpo("doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert "torch" in doctor.stdout
    listed = sdpo("env", "list")
    assert "lab" in listed.stdout
    shown = sdpo("env", "show", "lab")
    assert "[target]" in shown.stdout
