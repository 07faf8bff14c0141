"""`sdpo env`: find, look at, check, write and try environments from the shell.

An environment's own arguments follow as options, as in a recipe's [env.args]:

    sdpo env check science --path data/sciknoweval --system short

An argument that has the name of an option here is given as `--args.NAME`. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from sdpo.env import ENTRY_POINT_GROUP, Env, load_env
from sdpo.errors import ConfigError, SDPOError, boundary, did_you_mean
from sdpo.types import Grade, Task

__all__ = ["app"]

_OWN_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Name = Annotated[
    str, typer.Argument(metavar="ENV", help="A name, adapter:name, package.module:Class or file.py:Class.")
]


@app.command("list")
def list_() -> None:
    """Name the installed environments, each with its first line of documentation."""
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            told = (inspect.getdoc(point.load()) or "").partition("\n")[0]
        except ImportError as exc:
            told = f"not usable: {exc}"
        typer.echo(f"{point.name:<18} {told}")


@app.command(context_settings=_OWN_ARGUMENTS)
def show(
    context: typer.Context,
    env: Name,
    split: Annotated[str, typer.Option(help="Split to take the example from.")] = "train",
) -> None:
    """Describe an environment and print one of its tasks."""
    loaded = _load(env, context)
    try:
        typer.echo(loaded.describe())
        tasks = loaded.tasks(split)
        typer.echo(f"\n{len(tasks)} tasks in {split}; the first, {tasks[0].id}:\n")
        for message in tasks[0].prompt:
            typer.echo(f"[{message['role']}] {message['content']}")
        if tasks[0].demonstration:
            typer.echo(f"[demonstration] {tasks[0].demonstration}")
        typer.echo(f"[target] {tasks[0].target}")
    finally:
        loaded.close()


@app.command(context_settings=_OWN_ARGUMENTS)
def check(
    context: typer.Context,
    env: Name,
    split: Annotated[str, typer.Option(help="Split to check; test is looked at too.")] = "train",
    limit: Annotated[int, typer.Option(help="Tasks to try.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds after which a call counts as hanging.")] = 30.0,
) -> None:
    """Check that an environment keeps its contract. Exit code 1 when it does not."""
    from sdpo.env_check import check_env

    loaded = _load(env, context)
    splits = [split] if split == "test" else [split, "test"]
    report = check_env(loaded, splits=splits, limit=limit, timeout=timeout)
    for line in report:
        typer.echo(f"{line.verdict:<6}  {line.name}{': ' if line.detail else ''}{line.detail}")
    failed = sum(line.verdict == "failed" for line in report)
    typer.echo(f"{failed} of {len(report)} checks failed" if failed else f"all {len(report)} checks passed")
    if failed:
        raise typer.Exit(1)
    loaded.close()


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits, hyphens.")],
    folder: Annotated[Path, typer.Option(help="Where to put the package's folder.")] = Path("."),
) -> None:
    """Write a package with an environment of your own, a test and a recipe."""
    from sdpo.env_new import write_package

    for path in write_package(name, folder):
        typer.echo(f"wrote {path}")


@app.command(context_settings=_OWN_ARGUMENTS)
def grade(
    context: typer.Context,
    env: Name,
    task: Annotated[str, typer.Option(help="Id of the task.")] = "",
    completion: Annotated[str, typer.Option(help="File with the completion; - reads standard input.")] = "",
    input: Annotated[str, typer.Option(help="File with one JSON object a line; - reads standard input.")] = "",
) -> None:
    """Grade one completion, or one for each line of a file; writes one JSON grade a line.

    Lines have `completion` (or `response`) and say the task by `task`, an id, or by what the environment's `task_from`
    reads. A line that cannot be graded gets an `error`; then the exit code is 1.
    """
    if bool(input) == bool(task or completion) or bool(task) != bool(completion):
        raise ConfigError("nothing to grade", hint="give --task ID --completion FILE, or --input FILE.jsonl")
    loaded = _load(env, context)
    rows = _rows(input) if input else iter([{"task": task, "completion": _read(completion)}])
    failed = False
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows, 1):
        record: dict[str, Any] = {"id": row.get("id", row.get("task", number))}
        try:
            case, text = _case(loaded, row, number, tasks)
            record.update(asdict(_grade(loaded, case, text)))
        except SDPOError as exc:
            if not input:
                raise
            failed = True
            record["error"] = str(exc)
        typer.echo(json.dumps(record))
    loaded.close()
    if failed:
        raise typer.Exit(1)


def _load(name: str, context: typer.Context) -> Env:
    from sdpo.config import parse_overrides

    flags = [_prefixed(argument) for argument in context.args]
    return load_env(name, **parse_overrides(flags).get("args", {}))


def _prefixed(argument: str) -> str:
    """ "--path" as "--args.path", with hyphens as underscores; values stay."""
    if not argument.startswith("--"):
        return argument
    key, equals, value = argument[2:].removeprefix("env.").removeprefix("args.").partition("=")
    return f"--args.{key.replace('-', '_')}{equals}{value}"


def _rows(source: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(_read(source).split("\n"), 1):
        if line.strip():
            with boundary(f"read line {number} of {source}", ConfigError, ValueError):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise ConfigError(f"line {number} of {source} is not a JSON object")
            inner = row.get("input")
            yield {"id": row.get("id", number), **inner} if isinstance(inner, dict) else row


def _read(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    with boundary(f"read {source}", ConfigError, OSError, UnicodeDecodeError):
        return Path(source).read_text(encoding="utf-8")


def _case(env: Env, row: Mapping[str, Any], number: int, tasks: dict[str, Task]) -> tuple[Task, str]:
    text = row.get("completion", row.get("response"))
    if not isinstance(text, str):
        raise ConfigError(f"line {number} has no completion", hint='give it as the text "completion" or "response"')
    if "task" in row:
        if not tasks:
            tasks.update(_tasks_by_id(env))
        name = str(row["task"])
        if name not in tasks:
            raise ConfigError(f"line {number}: no task {name!r}", hint=did_you_mean(name, list(tasks)[:1000]))
        return tasks[name], text
    task_from = getattr(env, "task_from", None)
    if task_from is None:
        raise ConfigError(f"line {number} names no task", hint='give its id as "task"')
    with boundary(f"make a task of line {number}", ConfigError, KeyError, TypeError, ValueError):
        made = task_from(row)
    assert isinstance(made, Task)
    return made, text


def _tasks_by_id(env: Env) -> dict[str, Task]:
    found: dict[str, Task] = {}
    for split in ("test", "train"):
        try:
            found.update((task.id, task) for task in env.tasks(split))
        except ConfigError:
            if split == "train" and not found:
                raise
    return found


def _grade(env: Env, task: Task, text: str) -> Grade:
    verdict = env.grade(task, text)

    async def wait() -> Grade:
        assert inspect.isawaitable(verdict)
        return await verdict

    return verdict if isinstance(verdict, Grade) else asyncio.run(wait())
