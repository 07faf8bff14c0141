"""`sdpo sandbox check` and `sdpo sandbox serve`."""

from __future__ import annotations

import asyncio
import os
import platform
from typing import Annotated

import typer

from sdpo.errors import ConfigError, MissingDependencyError, did_you_mean

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Run untrusted code apart from the trainer.")


@app.command()
def check(
    require: Annotated[str, typer.Option(help="full or best_effort")] = "best_effort",
    level: Annotated[str, typer.Option(help="test this level, not the best of this machine")] = "",
) -> None:
    """What this machine offers, and whether the attacks are stopped. Exit code 1 if one is not."""
    from rich.console import Console
    from rich.table import Table

    from sdpo_sandbox.attacks import Attack, World, run_attacks
    from sdpo_sandbox.levels import Level, offer
    from sdpo_sandbox.local import LocalSandbox

    console = Console()
    if level and level not in list(Level):
        raise ConfigError(f"level {level!r}", hint=did_you_mean(level, map(str, Level)))
    chosen = Level(level) if level else None
    for name in Level:
        reason = offer(name)
        console.print(f"{'[green]yes[/]' if reason else '[red]no [/]'}  {name}" + (f"  ({reason})" if reason else ""))

    async def attack(world: World) -> list[tuple[Attack, bool, str]]:
        async with LocalSandbox(slots=1, require=require, level=chosen, unsafe=chosen is Level.NONE) as sandbox:
            console.print(f"using [bold]{sandbox.level}[/], uid {os.getuid()}, Python {platform.python_version()}")
            return await run_attacks(sandbox, world)

    with World() as world:
        outcomes = asyncio.run(attack(world))
    table = Table("attack", "outcome", "", box=None)
    for done, stopped, said in outcomes:
        table.add_row(done.name, "[green]stopped[/]" if stopped else "[red]SUCCEEDED[/]", said)
    console.print(table)
    good = sum(stopped for _, stopped, _ in outcomes)
    console.print(f"{good} of {len(outcomes)} attacks stopped")
    if good < len(outcomes):
        raise typer.Exit(1)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="address to bind; 0.0.0.0 opens it to the network")] = "127.0.0.1",
    port: Annotated[int, typer.Option()] = 8080,
    slots: Annotated[int, typer.Option(help="runs at a time; 0: one for each core")] = 0,
    imports: Annotated[str, typer.Option(help="packages to load beforehand, such as numpy,scipy")] = "",
    token: Annotated[str, typer.Option(envvar="SDPO_SANDBOX_TOKEN", help="bearer token to ask for")] = "",
    max_body_mb: Annotated[int, typer.Option(help="larger requests get 413")] = 64,
    queue: Annotated[int, typer.Option(help="requests at hand beyond which more get 429")] = 256,
    require: Annotated[str, typer.Option(help="full or best_effort")] = "full",
) -> None:
    """Answer Sandbox Fusion's /run_code over HTTP. Ends on SIGTERM or Ctrl-C, after the runs at hand."""
    try:
        import uvicorn

        from sdpo_sandbox.server import create_app
    except ImportError as exc:
        raise MissingDependencyError("sdpo sandbox serve", extra="serve") from exc
    from sdpo_sandbox.base import MIB
    from sdpo_sandbox.local import LocalSandbox

    names = [name.strip() for name in imports.split(",") if name.strip()]
    sandbox = LocalSandbox(slots=slots or None, imports=names, require=require)
    if host not in ("127.0.0.1", "::1", "localhost") and not token:
        typer.echo(f"warning: {host} is open to the network and asks for no token", err=True)
    typer.echo(f"isolation {sandbox.level}, {sandbox.slots} slots, http://{host}:{port}", err=True)
    application = create_app(sandbox, token=token, max_body_bytes=max_body_mb * MIB, queue=queue)
    uvicorn.run(application, host=host, port=port, log_level="warning", lifespan="on", access_log=False)
