"""`feddrift list`: the names of algorithms, streams, engines, patterns and nets, with summaries."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from feddrift import algorithms, engines, streams
from feddrift._internal import plugins
from feddrift.cli import console


def list_catalogue(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List the algorithms, streams and engines, one line each."""
    catalogue = {
        "algorithms": {name: entry.summary for name, entry in algorithms.ALGORITHMS.items()},
        "streams": streams.list_summaries(),
        "engines": {name: summary for name, (_, summary) in engines.ENGINES.items()},
    }
    for kind in ("algorithm", "stream", "engine"):
        catalogue[f"{kind}s"] |= {name: f"installed: {path}" for name, path in plugins.list_plugins(kind).items()}
    if as_json:
        entries_by_kind = {k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in catalogue.items()}
        print(json.dumps(entries_by_kind, indent=2))
        return
    catalogue["patterns"] = {
        "Y, F": "the paper's drifts with 2 and with 4 concepts",
        "R0 .. R4": "the paper's random drifts",
        "FILE": "whole numbers: a row per time step, a column per client; the last row only tests",
        "random:every=2,concepts=4": "each client draws a concept every 2 steps, by seed; also clients=, steps=, seed=",
    }
    catalogue["nets"] = {
        "linear": "no hidden layer",
        "mlp:64,64": "a perceptron with hidden layers of these sizes",
        "package.module:make": "your own: a Net, a PyTorch module's class, or a model with init, logits and fit",
    }
    catalogue["streams"]["FILE.csv"] = "your own table, with --client, --time and --label; any other name as table:FILE"
    catalogue["streams"]["FILE.toml"] = "your own recipe: base, label shares, concept maps, pattern (docs/streams.md)"
    catalogue["streams"]["folder:DIR"] = "your own data: DIR/client_<name>/step_<t>.csv (or .npz with x, y)"
    catalogue["algorithms"]["package.module:Name"] = "your own: a class with init(fed) and step(state, fed)"
    catalogue["streams"]["package.module:make"] = "your own: a function that makes a Stream"
    for kind, entries in catalogue.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, show_header=False)
        for name, summary in entries.items():
            table.add_row(f"[cyan]{name}[/]", summary)
        console.out.print(table, "")
    table = Table(
        title="settings (--set), with their defaults for other streams than the paper's",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
    )
    names: dict[tuple[tuple[str, str], ...], list[str]] = {}  # algorithms by their settings, which they share
    for name, entry in algorithms.ALGORITHMS.items():
        names.setdefault(tuple(_describe_settings(entry.cls).items()), []).append(name)
    for settings, methods in names.items():
        for k, (setting, text) in enumerate(settings):
            table.add_row(", ".join(methods) if k == 0 else "", f"[cyan]{setting}[/]", text)
    console.out.print(table)


def _describe_settings(cls: type[Any]) -> dict[str, str]:
    """Return the help text and the default of each setting."""
    options = algorithms.get_options(cls).items()
    return {k: f"{f.metadata['help']} [dim]({'none' if f.default is None else f.default})[/]" for k, f in options}
