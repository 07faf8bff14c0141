"""The command line. Nothing here imports torch before a command needs it: `sdpo --help` answers at once.

Exit codes: 0 done, 1 failed, 2 a mistake that the user can mend (one line and a hint, no traceback; `--debug` shows it).
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdpo.env_cli import app as env_app
from sdpo.errors import ConfigError, SDPOError

if TYPE_CHECKING:
    from sdpo.config import Config

__all__ = ["app", "main"]

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Reinforcement learning with rich feedback: SDPO, GRPO and blends of both.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(env_app, name="env", help="Find, try, check and write environments.")


def _configured(context: typer.Context, recipe: Path) -> Config:
    """RECIPE.toml [MORE.toml ...] [--section.key value ...]"""
    from sdpo.config import load_config

    rest = list(context.args)
    files: list[str | Path] = [recipe]
    while rest and rest[0].endswith(".toml") and not rest[0].startswith("--"):
        files.append(rest.pop(0))
    return load_config(files, rest)


Recipe = Annotated[Path, typer.Argument(help="A TOML file; more of them may follow, later ones on top.")]


@app.command(context_settings=_OVERRIDES)
def train(
    context: typer.Context,
    recipe: Recipe,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan.")] = False,
    dump_prompts: Annotated[int, typer.Option(help="Write N aligned student and teacher prompts.")] = 0,
) -> None:
    """Train by a recipe: sdpo train RECIPE.toml [MORE.toml] [--section.key value]."""
    if dump_prompts:
        context.args += ["--run.dump_prompts", str(dump_prompts)]
    config = _configured(context, recipe)
    if dry_run:
        _print_plan(config)
        return
    from sdpo.train import train as run

    result = run(config, sys.argv)
    best = dict(result.evaluations).get(-1 if result.best_step is None else result.best_step)
    told = "" if best is None else f"; best {best.success:.3f} at step {result.best_step}"
    typer.echo(f"{result.steps} steps in {result.run_dir}{told}")


def _print_plan(config: Config) -> None:
    import tomli_w

    from sdpo.config import deviations

    typer.echo(tomli_w.dumps(config.to_toml()))
    for key, (preset, now) in deviations(config).items():
        typer.echo(f"# {key} = {now!r}, where {config.algo.name} has {preset!r}")
    train = config.train
    mini = train.mini_batch_prompts or train.prompts_per_step
    typer.echo(
        f"# {train.steps} steps of {train.prompts_per_step} x {train.rollouts_per_prompt} rollouts, "
        f"{train.prompts_per_step // mini} optimiser steps each; "
        f"{train.steps * train.prompts_per_step * train.rollouts_per_prompt:,} rollouts in all"
    )


@app.command("eval", context_settings=_OVERRIDES)
def evaluate(
    context: typer.Context,
    recipe: Recipe,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder to load instead of model.path.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON, and rollouts beside it.")] = None,
) -> None:
    """Evaluate a model or a checkpoint on the recipe's evaluation split."""
    from sdpo.evaluate import evaluate as run
    from sdpo.jsonl import write_json
    from sdpo.run import write_groups

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}", hint="create it first")
    result, groups = run(_configured(context, recipe), checkpoint)
    low, high = result.interval
    typer.echo(f"avg@{result.rollouts} {result.success:.4f}  (95 % interval over tasks: {low:.4f} to {high:.4f})")
    typer.echo("  ".join(f"pass@{k} {value:.4f}" for k, value in result.pass_at.items()))
    typer.echo(
        f"{result.tasks} tasks, mean length {result.length:.1f}, truncated {result.truncated:.1%}, "
        f"not gradable {result.failed}"
    )
    for name, value in result.metrics.items():
        typer.echo(f"{name} {value:.4f}")
    if out is not None:
        write_json(out, result.to_record())
        write_groups(out.with_suffix(".rollouts.jsonl"), groups)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder of a run.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Write a checkpoint as a plain Hugging Face folder, a LoRA adapter merged into its base."""
    from sdpo.export import export as run

    run(checkpoint, out)
    typer.echo(f"wrote {out}")


@app.command()
def doctor() -> None:
    """Say what this machine has: versions, devices, types, extras."""
    from sdpo.doctor import report

    for line in report():
        typer.echo(line)


def _mount_plugins() -> None:
    """Sub-commands of other packages, by the entry-point group `sdpo.cli`; loaded only when one of them is called."""
    called = next((a for a in sys.argv[1:] if not a.startswith("-")), None)
    for point in entry_points(group="sdpo.cli"):
        if point.name == called or called is None:
            app.add_typer(point.load(), name=point.name)


def main() -> None:
    """Entry point of the `sdpo` command."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    _mount_plugins()
    try:
        app()
    except SDPOError as exc:
        if debug:
            raise
        typer.echo(f"sdpo: {exc}", err=True)
        raise SystemExit(2 if isinstance(exc, (ConfigError, LookupError, ImportError)) else 1) from None
    except KeyboardInterrupt:
        typer.echo("sdpo: interrupted; --run.resume continues from the last checkpoint", err=True)
        raise SystemExit(130) from None
