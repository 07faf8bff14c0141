"""The run directory: everything a run leaves behind, so that it can be read, repeated and resumed.

    config.toml           resolved settings; `sdpo train config.toml --run.dir elsewhere` repeats the run
    environment.json      git revision, versions, machine, command line, seed, time; one more entry a resumption
    metrics.jsonl         one line a step
    evals.jsonl           one line an evaluation
    rollouts/000010.jsonl one line a group of step 10
    prompts.jsonl         student and teacher prompts, on request
    checkpoints/000100/   see sdpo.checkpoint
    summary.json          at the end

A line is on disk when the call returns; a line that a kill tore is dropped on reading; whole files are written under
another name and renamed (sdpo.jsonl). Only one process at a time may write a directory. Not covered: several writers,
directories on object stores.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from sdpo.config import Config, build_config
from sdpo.errors import CheckpointError, ConfigError, boundary
from sdpo.jsonl import append_jsonl, jsonable, read_jsonl, write_json, write_jsonl, write_whole
from sdpo.provenance import environment
from sdpo.types import Group, Rollout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["RunDir", "write_groups"]

_LOCK = ".lock"
_MARK = "# Resolved settings of a run of sdpo"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# What may differ when a run is resumed: where and how it runs, not what comes out of it. Besides, train.steps may grow
# under a constant learning rate. How an evaluation is done is fixed: its numbers are compared to find the best.
_MAY_CHANGE = {
    *("env.max_concurrent", "env.timeout", "eval.every", "eval.at_start"),
    *("model.threads", "model.gradient_checkpointing"),
    *("train.micro_batch_tokens", "train.max_failed_fraction", "train.save_every", "train.keep_checkpoints"),
}
_MAY_CHANGE_SECTIONS = {"monitor", "run"}  # run.seed apart

_held: set[int] = set()


def _drop_locks_after_fork() -> None:
    # A forked child shares the lock: a worker that outlives a killed trainer would keep the directory locked.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_locks_after_fork)


class RunDir:
    """One run directory. `RunDir(path)` reads one; `RunDir.open(config, argv)` starts or resumes one and locks it.

    Attributes:
        path: the directory.
        checkpoints: the folder of its checkpoints.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse at once what `open` would refuse; touches nothing. Raises ConfigError as `open` does."""
        cls(Path(config.run.dir).expanduser())._check(config)

    @classmethod
    def open(cls, config: Config, argv: Sequence[str] = ()) -> RunDir:
        """Create the directory of `config.run`, or take up the one that is there.

        Raises:
            ConfigError: it is in use, not empty without `run.resume` or `run.overwrite`, not a run's, or of a run with
                other settings.
            CheckpointError: it cannot be written.
        """
        run = cls(Path(config.run.dir).expanduser())
        run._check(config)
        with boundary(f"create run.dir = {run.path}", ConfigError, hint="choose another run.dir"):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        run._acquire()
        try:
            run._check(config)  # again: another process may have come first
            if config.run.overwrite:
                run._clear()
            run._describe(config, argv)
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Let other processes write the directory."""
        if self._lock in _held:  # not in a forked child, which has closed it already
            _held.remove(self._lock)
            os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the line of a step; `record` has the key `step`."""
        append_jsonl(self.path / "metrics.jsonl", {"step": int(record["step"]), **record})

    def append_eval(self, record: Mapping[str, Any]) -> None:
        """Add the line of an evaluation; `record` has the key `step`."""
        append_jsonl(self.path / "evals.jsonl", {"step": int(record["step"]), **record})

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of all steps, in order."""
        return read_jsonl(self.path / "metrics.jsonl")

    def read_evals(self) -> list[dict[str, Any]]:
        """The lines of all evaluations, in order."""
        return read_jsonl(self.path / "evals.jsonl")

    def read_rollouts(self, step: int) -> list[dict[str, Any]]:
        """The groups that `write_rollouts` wrote for a step; empty when it wrote none."""
        return read_jsonl(self._rollouts(step))

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Write the groups of a step."""
        write_groups(self._rollouts(step), groups)

    def write_prompts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write prompts.jsonl."""
        write_jsonl(self.path / "prompts.jsonl", records)

    def write_summary(self, record: Mapping[str, Any]) -> None:
        """Write summary.json."""
        write_json(self.path / "summary.json", record)

    def rewind(self, step: int) -> None:
        """Forget everything later than `step`, so that the steps after it can be run again; -1 forgets all.

        Raises:
            CheckpointError: a file is damaged or cannot be written.
        """
        for name in ("metrics.jsonl", "evals.jsonl"):
            file = self.path / name
            if file.exists():
                write_jsonl(file, [record for record in read_jsonl(file) if record["step"] <= step])
        stale = [p for p in (self.path / "rollouts").glob("[0-9]*.jsonl") if int(p.stem) > step]
        stale += [self.path / "summary.json"]
        if step < 1:
            stale.append(self.path / "prompts.jsonl")
        with boundary(f"rewind {self.path} to step {step}", CheckpointError):
            for file in stale:
                file.unlink(missing_ok=True)

    def _rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"{step:06d}.jsonl"

    def _check(self, config: Config) -> None:
        """Refuse what must not be written over or continued."""
        path, where = self.path, f"run.dir = {self.path}"
        ours = _is_run(path / "config.toml")
        if config.run.resume:
            if not ours:
                raise ConfigError(f"{where} holds no run to resume", hint="leave out --run.resume to start one")
            if found := _differences(path / "config.toml", config):
                raise ConfigError(
                    f"{where} was started with other settings: {found}", hint="resume with its own settings"
                )
        elif not ours and _contents(path):
            raise ConfigError(f"{where} is not empty and not a run's directory", hint="choose another run.dir")
        elif ours and not config.run.overwrite:
            raise ConfigError(f"{where} holds a run already", hint="--run.resume, --run.overwrite or another --run.dir")

    def _acquire(self) -> None:
        with boundary(f"lock {self.path}", ConfigError, hint="choose another run.dir"):
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"run.dir = {self.path} is in use by another process", hint="choose another") from None
        except OSError as exc:
            if exc.errno not in _UNSUPPORTED:  # some network file systems have no locks: then there is no protection
                os.close(descriptor)
                raise ConfigError(f"could not lock {self.path}: {exc}", hint="choose another run.dir") from exc
        self._lock = descriptor
        _held.add(descriptor)

    def _clear(self) -> None:
        with boundary(f"remove what is in run.dir = {self.path}", ConfigError, hint="choose another run.dir"):
            # config.toml last: half-removed, the directory must still be known as a run's.
            for child in sorted(self.path.iterdir(), key=lambda path: path.name == "config.toml"):
                if child.name == _LOCK:
                    continue
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                else:
                    child.unlink()
            self.checkpoints.mkdir()

    def _describe(self, config: Config, argv: Sequence[str]) -> None:
        """Write config.toml and environment.json; remove what a killed writer left."""
        with boundary(f"tidy {self.path}", CheckpointError):
            for leftover in (*self.path.glob(".*.tmp"), *self.path.glob("rollouts/.*.tmp")):
                leftover.unlink()
        with boundary("write the settings as TOML", ConfigError, TypeError, ValueError, hint="see env.args"):
            text = tomli_w.dumps(_repeatable(config))
        write_whole(self.path / "config.toml", f"{_MARK}; running it again repeats the run.\n{text}")
        now, file = environment(argv, config.run.seed), self.path / "environment.json"
        write_json(file, _with_resumption(file, now) if config.run.resume else now)


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write groups as JSON lines: the task's id and prompt, and each rollout with its verdict.

    Targets and metadata of tasks are left out: they may be large, and no policy saw them.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_jsonl(path, [_group_record(group) for group in groups])


def _group_record(group: Group) -> dict[str, Any]:
    rollouts = [_rollout_record(rollout) for rollout in group.rollouts]
    return {"task_id": group.task.id, "prompt": group.task.prompt, "rollouts": rollouts}


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    grade, failure, completion = rollout.grade, rollout.failure, rollout.completion
    return {
        "index": rollout.index,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "reward": None if grade is None else grade.reward,
        "success": None if grade is None else grade.success,
        "feedback": None if grade is None else grade.feedback,
        "metrics": {} if grade is None else grade.metrics,
        "failure": None if failure is None else dataclasses.asdict(failure),
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }


def _is_run(config_file: Path) -> bool:
    try:
        with config_file.open(encoding="utf-8", errors="replace") as stream:
            return stream.readline().startswith(_MARK)
    except OSError:
        return False


def _contents(path: Path) -> list[str]:
    """What is in a directory, less what a run that died at its very start leaves."""
    with boundary(f"read run.dir = {path}", ConfigError, hint="choose another run.dir"):
        if not path.is_dir():
            return []
        return [
            child.name
            for child in path.iterdir()
            if child.name != _LOCK
            and not child.name.endswith(".tmp")
            and not (child.name == "checkpoints" and not any(child.iterdir()))
        ]


def _repeatable(config: Config) -> dict[str, Any]:
    data = config.to_toml()
    return {**data, "run": {**data["run"], "resume": False, "overwrite": False}}


def _differences(config_file: Path, config: Config) -> str:
    """The first settings that would change the result of the stored run; empty when there are none."""
    with boundary(f"read {config_file}", ConfigError, OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        stored = build_config(tomllib.loads(config_file.read_text(encoding="utf-8")))
    old, new = _flat(stored.to_toml()), _flat(jsonable(config.to_toml()))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _may_change(key, old, new)]
    told = [f"{key} = {old.get(key, 'not set')!r} there, {new.get(key, 'not set')!r} now" for key in changed[:3]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return "; ".join(told) + more


def _may_change(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if key == "train.steps":
        return bool(new["optim.schedule"] == "constant" and new[key] >= old[key])
    return key in _MAY_CHANGE or (key.split(".")[0] in _MAY_CHANGE_SECTIONS and key != "run.seed")


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in data.items() for key, value in table.items()}


def _with_resumption(file: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The first start's record with this start added to its resumptions."""
    with boundary(f"read {file}", CheckpointError, OSError, ValueError, hint="remove the damaged file"):
        if not file.exists():
            return now
        first: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {**first, "resumed": [*first.get("resumed", []), now]}
