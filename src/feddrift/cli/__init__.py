"""The command line: one file for each group of commands, put together here."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.logging import RichHandler

from feddrift._version import __version__
from feddrift.cli import catalogue, console, deploy, keys, report, run, sweep
from feddrift.cli.console import fail, tell
from feddrift.errors import FeddriftError
from feddrift.runs.background import busy

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when the data of different clients drift at different times.",
)
app.command("list")(catalogue.list_)
app.command("run")(run.run_)
app.command("resume")(run.resume)
app.command("update")(run.update)
app.command("export")(run.export_)
app.command("sweep")(sweep.sweep_)
app.command("report")(report.report)
app.command("plot")(report.plot)
app.command("follow")(report.follow)
deploy.app.command()(keys.renew)
deploy.app.command()(keys.rotate)
deploy.app.command()(keys.revoke)
app.add_typer(deploy.app, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"feddrift {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


def _once() -> Callable[[logging.LogRecord], bool]:
    """A filter that lets each message through once, however many seeds repeat it."""
    seen: set[str] = set()

    def new(line: logging.LogRecord) -> bool:
        message = line.getMessage()
        return not (message in seen or seen.add(message))  # type: ignore[func-returns-value]

    return new


def main() -> None:
    """The `feddrift` command: one sentence and exit code 2 for bad input, 130 when a run is stopped."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing but a run has anything to save
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ± still gets its table
    handler = RichHandler(console=console.err, show_time=False, show_path=False)
    handler.addFilter(_once())
    logging.basicConfig(format="%(message)s", handlers=[handler])
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except FeddriftError as error:
        code = fail(str(error))
    except console.CommandLineError as error:
        code = fail(re.sub(r"( Did you mean [^?]+\?)\1", r"\1", error.format_message()))  # typer and click both suggest
    except BrokenPipeError:
        code = 141  # as if SIGPIPE had ended it
    except OSError as error:
        code = fail(f"cannot write the output: {error.strerror or error}")
    except SystemExit as stop:  # the console's way to say that its pipe is gone
        code = int(stop.code or 0)
    if code == 130:  # Ctrl-C, as typer reports it
        tell("stopped; what was done is on disk")
    if busy():  # do not wait for compiled code that still runs
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
