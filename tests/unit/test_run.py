"""The run directory: refusals, records that survive kills and full disks, resuming, locking."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdpo.config import load_config
from sdpo.errors import CheckpointError, ConfigError
from sdpo.jsonl import read_jsonl, write_whole
from sdpo.run import RunDir, write_groups
from sdpo.types import Completion, Failure, Grade, Group, Message, Rollout, Task

MakeConfig = Callable[..., Any]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere; nobody may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A child process with its standard output open."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


HOLD = """
    import sys, time
    from sdpo.config import build_config
    from sdpo.run import RunDir
    config = build_config({"algo": {"name": "sdpo"}, "model": {"path": "lab"}, "env": {"name": "lab"},
                           "run": {"dir": sys.argv[1]}})
    run = RunDir.open(config)
"""


def make_groups() -> list[Group]:
    task = Task("add-1", (Message(role="user", content="2 + 2? ü"),), target={"secret": 4}, metadata={"big": "x"})
    right = Rollout(
        "add-1",
        0,
        (1, 2),
        Completion("4\n\ud800", (7, 9), (-0.5, -math.inf)),
        Grade(1.0, success=True, metrics={"s": math.nan}),
    )
    wrong = Rollout("add-1", 1, (1, 2), Completion("5", (8,), None, "length"), Grade(0.0, "off by one", success=False))
    lost = Rollout("add-1", 2, (1, 2), Completion("6", (8,)), None, Failure("sandbox", "connection refused"))
    return [Group(task, (right, wrong, lost))]


# --- starting


def test_a_fresh_run_writes_settings_that_repeat_it(make_config: MakeConfig) -> None:
    config = make_config(loss={"top_k": None}, env={"args": {"size": 3}}, run={"overwrite": True, "seed": 5})
    with RunDir.open(config, ["sdpo", "train", "x.toml"]) as run:
        again = load_config([run.path / "config.toml"])
    assert again.run.overwrite is False
    assert again == config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})


def test_environment_says_where_the_run_came_from(make_config: MakeConfig) -> None:
    with RunDir.open(make_config(run={"seed": 5}), ["sdpo", "train", "x.toml"]) as run:
        record = json.loads((run.path / "environment.json").read_text())
    assert record["argv"] == ["sdpo", "train", "x.toml"]
    assert record["seed"] == 5
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(record["versions"]) >= {"torch", "transformers"}
    assert record["device"]["cores"] >= 1
    assert record["time"].endswith("+00:00")


@pytest.mark.parametrize("modified", [False, True])
def test_environment_has_the_git_revision_of_the_working_directory(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, modified: bool
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "file").write_text("1")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    if modified:
        (repository / "file").write_text("2")
    monkeypatch.chdir(repository)
    with RunDir.open(make_config()) as run:
        git = json.loads((run.path / "environment.json").read_text())["git"]
    assert len(git["revision"]) == 40
    assert git["modified"] is modified


def test_environment_without_a_repository(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with RunDir.open(make_config()) as run:
        assert json.loads((run.path / "environment.json").read_text())["git"] is None


def test_a_second_start_is_refused_with_both_ways_out(make_config: MakeConfig) -> None:
    RunDir.open(make_config()).close()
    with pytest.raises(ConfigError, match=r"holds a run already \(--run.resume, --run.overwrite"):
        RunDir.open(make_config())


def test_overwrite_removes_the_old_run_and_nothing_behind_its_links(tmp_path: Path, make_config: MakeConfig) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep")
    with RunDir.open(make_config()) as run:
        run.append_metrics({"step": 1, "loss": 0.5})
        (run.checkpoints / "000001").mkdir()
        (run.path / "link").symlink_to(outside)
    with RunDir.open(make_config(run={"overwrite": True})) as run:
        assert run.read_metrics() == []
        assert {p.name for p in run.path.iterdir()} == {".lock", "config.toml", "environment.json", "checkpoints"}
        assert list(run.checkpoints.iterdir()) == []
    assert (outside / "precious").read_text() == "keep"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "config.toml", ".hidden"])
def test_a_directory_that_is_no_run_is_never_touched(
    tmp_path: Path, make_config: MakeConfig, name: str, overwrite: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text('[algo]\nname = "sdpo"\n')
    with pytest.raises(ConfigError, match=r"is not empty and not a run's directory \(choose another"):
        RunDir.open(make_config(run={"overwrite": overwrite}))
    assert [p.name for p in folder.iterdir()] == [name]


def test_an_empty_directory_is_taken(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "run").mkdir()
    RunDir.open(make_config()).close()


def test_what_a_start_killed_at_once_leaves_is_taken(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / ".config.toml.99.tmp").write_text("half")
    with RunDir.open(make_config()) as run:
        assert not list(run.path.glob("*.tmp"))
        assert not list(run.path.glob(".*.tmp"))


def test_settings_that_toml_cannot_hold_are_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="could not write the settings as TOML"):
        RunDir.open(make_config(env={"args": {"names": ["a", None]}}))


# --- resuming


def test_resume_needs_a_run(tmp_path: Path, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"holds no run to resume \(leave out --run.resume"):
        RunDir.open(make_config(run={"resume": True}))
    assert not (tmp_path / "run").exists()


def test_resume_keeps_records_and_adds_to_the_environment(make_config: MakeConfig) -> None:
    with RunDir.open(make_config(), ["first"]) as run:
        run.append_metrics({"step": 1})
    for argv in (["second"], ["third"]):
        with RunDir.open(make_config(run={"resume": True}), argv) as run:
            assert [r["step"] for r in run.read_metrics()] == [1]
    record = json.loads((run.path / "environment.json").read_text())
    assert record["argv"] == ["first"]
    assert [r["argv"] for r in record["resumed"]] == [["second"], ["third"]]


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"optim": {"lr": 3e-5}}, "optim.lr = 1e-05 there, 3e-05 now"),
        ({"run": {"seed": 1}}, "run.seed = 0 there, 1 now"),
        ({"train": {"steps": 50}}, "train.steps = 100 there, 50 now"),
        ({"eval": {"rollouts": 2}}, "eval.rollouts = 16 there, 2 now"),
        ({"loss": {"top_k": None}}, "loss.top_k = 100 there, 'none' now"),
        ({"algo": {"name": "grpo"}}, "algo.name = 'sdpo' there, 'grpo' now"),
        ({"env": {"args": {"size": 4}}}, "env.args"),
        ({"sampling": {"batch_size": 7}}, "sampling.batch_size"),
    ],
)
def test_resume_refuses_settings_that_would_change_the_result(
    make_config: MakeConfig, changed: dict[str, Any], key: str
) -> None:
    RunDir.open(make_config()).close()
    tables = {**changed, "run": {"resume": True, **changed.get("run", {})}}
    with pytest.raises(ConfigError, match="was started with other settings") as error:
        RunDir.open(make_config(**tables))
    assert key in str(error.value)


def test_resume_lists_the_first_three_differences(make_config: MakeConfig) -> None:
    RunDir.open(make_config()).close()
    changed = {"optim": {"lr": 1.0, "weight_decay": 0.5, "max_grad_norm": 2.0, "betas": [0.5, 0.9]}}
    with pytest.raises(ConfigError, match="and 1 more"):
        RunDir.open(make_config(run={"resume": True}, **changed))


def test_resume_takes_settings_that_leave_the_result_alone(make_config: MakeConfig) -> None:
    RunDir.open(make_config()).close()
    changed: dict[str, Any] = {
        "train": {"steps": 200, "micro_batch_tokens": 512, "save_every": 7},
        "eval": {"every": 3},
        "monitor": {"stop_on_collapse": True},
        "model": {"threads": 1},
    }
    with RunDir.open(make_config(run={"resume": True, "rollouts_every": 1}, **changed)) as run:
        assert load_config([run.path / "config.toml"]).train.steps == 200


def test_resume_may_not_stretch_a_schedule_that_depends_on_the_steps(make_config: MakeConfig) -> None:
    cosine = {"schedule": "cosine"}
    RunDir.open(make_config(optim=cosine)).close()
    RunDir.open(make_config(optim=cosine, run={"resume": True})).close()
    with pytest.raises(ConfigError, match=r"train.steps = 100 there, 200 now"):
        RunDir.open(make_config(optim=cosine, train={"steps": 200}, run={"resume": True}))


def test_a_damaged_config_is_one_line(tmp_path: Path, make_config: MakeConfig) -> None:
    RunDir.open(make_config()).close()
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text() + "\n[")
    with pytest.raises(ConfigError, match=r"could not read .*config.toml: TOMLDecodeError"):
        RunDir.open(make_config(run={"resume": True}))


def test_rewind_forgets_what_came_after_the_checkpoint(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        for step in range(4):
            run.append_eval({"step": step, "success": step / 10})
            run.append_metrics({"step": step})
            run.write_rollouts(step, make_groups())
        run.write_prompts([{"task_id": "t"}])
        run.write_summary({"steps": 3})
        run.rewind(2)
        assert [r["step"] for r in run.read_metrics()] == [0, 1, 2]
        assert [r["success"] for r in run.read_evals()] == [0.0, 0.1, 0.2]
        assert sorted(p.name for p in (run.path / "rollouts").iterdir()) == [f"00000{i}.jsonl" for i in range(3)]
        assert not (run.path / "summary.json").exists()
        assert (run.path / "prompts.jsonl").exists()
        run.append_metrics({"step": 3, "again": True})
        assert run.read_metrics()[-1] == {"step": 3, "again": True}
        run.rewind(-1)
        assert (run.read_metrics(), run.read_evals(), list((run.path / "rollouts").iterdir())) == ([], [], [])
        assert not (run.path / "prompts.jsonl").exists()


def test_rewind_of_a_run_that_wrote_nothing(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        run.rewind(-1)
        assert run.read_metrics() == run.read_rollouts(1) == []


# --- records


def test_records_come_back_with_nan_and_infinity_as_null(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        run.append_metrics(
            {
                "step": np.int64(3),
                "loss": math.nan,
                "grad_norm": math.inf,
                "lr": np.float32(0.5),
                "ok": np.bool_(True),
                "huge": 10**5000,
                "seconds": {"step": 1.5, "odd": [-math.inf, (1, 2)]},
                "path": Path("x"),
            }
        )
        text = (run.path / "metrics.jsonl").read_text()
        assert run.read_metrics() == [
            {
                "step": 3,
                "loss": None,
                "grad_norm": None,
                "lr": 0.5,
                "ok": True,
                "huge": None,
                "seconds": {"step": 1.5, "odd": [None, [1, 2]]},
                "path": "x",
            }
        ]
    assert "NaN" not in text
    assert "Infinity" not in text
    assert text.count("\n") == 1


def test_rollouts_come_back_without_targets(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        run.write_rollouts(10, make_groups())
        assert (run.path / "rollouts" / "000010.jsonl").is_file()
        (line,) = run.read_rollouts(10)
    assert line["task_id"] == "add-1"
    assert line["prompt"] == [{"role": "user", "content": "2 + 2? ü"}]
    right, wrong, lost = line["rollouts"]
    assert (right["completion"], right["token_ids"], right["logprobs"]) == ("4\n\ud800", [7, 9], [-0.5, None])
    assert (right["reward"], right["success"], right["metrics"]) == (1.0, True, {"s": None})
    assert (wrong["feedback"], wrong["finish_reason"], wrong["success"]) == ("off by one", "length", False)
    assert (lost["reward"], lost["failure"]) == (None, {"boundary": "sandbox", "message": "connection refused"})
    assert "secret" not in json.dumps(line)


def test_groups_are_written_anywhere(tmp_path: Path) -> None:
    write_groups(tmp_path / "deep" / "out.jsonl", make_groups())
    assert len(read_jsonl(tmp_path / "deep" / "out.jsonl")) == 1


def test_a_torn_last_line_is_dropped_and_rewind_removes_it(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        run.append_metrics({"step": 1})
        file = run.path / "metrics.jsonl"
        file.write_bytes(file.read_bytes() + b'{"step": 2, "lo')
        assert run.read_metrics() == [{"step": 1}]
        run.rewind(1)
        run.append_metrics({"step": 2})
        assert run.read_metrics() == [{"step": 1}, {"step": 2}]


def test_damage_in_the_middle_is_named_not_skipped(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
        with pytest.raises(CheckpointError, match=r"could not read line 2 of .*metrics.jsonl"):
            run.read_metrics()


def test_a_reader_needs_no_lock(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        run.append_eval({"step": 0, "success": 0.25})
        assert RunDir(run.path).read_evals() == [{"step": 0, "success": 0.25}]


# --- disks


def test_a_full_disk_is_one_line_with_the_way_out(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()) as run:
        (run.path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"write .*metrics.jsonl: OSError: .*No space left.* \(free space"):
            run.append_metrics({"step": 1, "loss": 0.5})


def test_a_file_that_may_not_grow_keeps_whole_lines_and_whole_files(make_config: MakeConfig) -> None:
    config = make_config()
    child = python(
        HOLD
        + """
    import json, resource, signal
    from sdpo.errors import CheckpointError
    run.append_metrics({"step": 1})
    run.write_summary({"text": "short"})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for write in (run.append_metrics, run.write_summary):
        try:
            write({"step": 2, "text": "x" * 100_000})
        except CheckpointError as exc:
            print(exc)
    """,
        config.run.dir,
    )
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0, output
    assert len(output.splitlines()) == 2
    assert "metrics.jsonl: OSError: [Errno 27] File too large (free space" in output.splitlines()[0]
    run = RunDir(config.run.dir)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert json.loads((run.path / "summary.json").read_text()) == {"text": "short"}
    assert not list(run.path.glob(".*.tmp"))


def test_an_unwritable_parent_is_one_line(make_config: MakeConfig) -> None:
    with tempfile.TemporaryDirectory() as locked:  # not below tmp_path, which other users may not enter
        os.chmod(locked, 0o555)
        config = make_config(run={"dir": f"{locked}/run"})
        with as_nobody(), pytest.raises(ConfigError, match=r"create run.dir = .*PermissionError.* \(choose another"):
            RunDir.open(config)


def test_a_file_in_the_way_is_one_line(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"could not create run.dir"):
        RunDir.open(make_config())
    with pytest.raises(ConfigError, match=r"could not create run.dir"):
        RunDir.open(make_config(run={"overwrite": True, "dir": str(tmp_path / "run" / "below")}))
    assert (tmp_path / "run").read_text() == "not a folder"


def test_writing_whole_leaves_the_old_file_when_it_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()
    with pytest.raises(CheckpointError, match=r"write .*file"):
        write_whole(tmp_path / "file", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# --- locking


def test_two_processes_cannot_write_one_run(make_config: MakeConfig) -> None:
    config = make_config()
    child = python(HOLD + "    print('ready', flush=True)\n    time.sleep(60)\n", config.run.dir)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ConfigError, match="is in use by another process"):
                RunDir.open(make_config(run=how))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    RunDir.open(make_config(run={"resume": True})).close()


def test_a_kill_releases_the_lock_although_a_worker_outlives_it(make_config: MakeConfig) -> None:
    config = make_config()
    code = HOLD + (
        "    import os\n    if os.fork() == 0:\n        print(os.getpid(), flush=True)\n    time.sleep(60)\n"
    )
    child = python(code, config.run.dir)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    try:
        child.send_signal(signal.SIGKILL)
        child.wait()
        os.kill(worker, 0)  # it is alive
        RunDir.open(make_config(run={"resume": True})).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_one_process_cannot_open_a_run_twice(make_config: MakeConfig) -> None:
    with RunDir.open(make_config()), pytest.raises(ConfigError, match="in use"):
        RunDir.open(make_config(run={"resume": True}))
    RunDir.open(make_config(run={"resume": True})).close()


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_at_any_moment_leaves_readable_records(make_config: MakeConfig, seed: int) -> None:
    config = make_config()
    child = python(
        HOLD
        + """
    print("ready", flush=True)
    step = 0
    while True:
        step += 1
        run.append_metrics({"step": step, "text": "x" * 5000})
        run.write_summary({"step": step, "text": "y" * 50_000})
    """,
        config.run.dir,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05 + 0.03 * seed)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with RunDir.open(make_config(run={"resume": True})) as run:
        read = run.read_metrics()
        assert [r["step"] for r in read] == list(range(1, len(read) + 1))
        if (run.path / "summary.json").exists():
            assert len(json.loads((run.path / "summary.json").read_text())["text"]) == 50_000
        run.rewind(len(read) // 2)
        assert len(run.read_metrics()) == len(read) // 2
