"""The command line: a module for each group of commands, and the application that contains them."""

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
from feddrift.cli.console import print_error, print_to_stderr
from feddrift.errors import FeddriftError
from feddrift.runs.background import has_running_thread

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when the data of different clients drift at different times.",
)
app.command("list")(catalogue.list_catalogue)
app.command("run")(run.run_algorithms)
app.command("resume")(run.resume_runs)
app.command("update")(run.update_runs)
app.command("export")(run.export_models)
app.command("sweep")(sweep.sweep_runs)
app.command("report")(report.report_records)
app.command("plot")(report.plot_records)
app.command("follow")(report.follow_runs)
deploy.app.command("renew")(keys.renew_certificate)
deploy.app.command("rotate")(keys.rotate_key)
deploy.app.command("revoke")(keys.revoke_client)
deploy.app.command("keys")(keys.list_keys)
app.add_typer(deploy.app, name="deploy")


def _print_version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"feddrift {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


def _build_repeat_filter() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that passes each message once, since runs with several seeds repeat messages."""
    old_messages: set[str] = set()

    def is_new(line: logging.LogRecord) -> bool:
        message = line.getMessage()
        if message in old_messages:
            return False
        old_messages.add(message)
        return True

    return is_new


def main() -> None:
    """Run the `feddrift` command, and exit with code 0, with 2 after bad input, or with 130 after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # commands that save their work set their own handler
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals without characters such as ±
    handler = RichHandler(console=console.err, show_time=False, show_path=False)
    handler.addFilter(_build_repeat_filter())
    logging.basicConfig(format="%(message)s", handlers=[handler])
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except FeddriftError as error:
        code = print_error(str(error))
    except console.CommandLineError as error:
        message = re.sub(r"( Did you mean [^?]+\?)\1", r"\1", error.format_message())  # typer and click both suggest
        code = print_error(message)
    except BrokenPipeError:
        code = 141  # the exit code of a process that SIGPIPE ended
    except OSError as error:
        code = print_error(f"cannot write the output: {error.strerror or error}")
    except SystemExit as stop:  # rich raises it if the pipe of a console is closed
        code = int(stop.code or 0)
    if code == 130:  # Ctrl-C, as typer reports it
        print_to_stderr("stopped; all completed work is saved")
    if has_running_thread():  # do not wait for compiled code
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
