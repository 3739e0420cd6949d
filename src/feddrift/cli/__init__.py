"""The command line: a module for each group of commands, and the application that contains them."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Annotated

import typer
from rich.logging import RichHandler

from feddrift._version import __version__
from feddrift.cli import catalogue, console, deploy, keys, report, run, sweep
from feddrift.cli.console import print_error, print_to_stderr
from feddrift.errors import ConfigError, FeddriftError
from feddrift.runs.background import has_running_thread

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when the data of different clients drift at different times.",
)
app.command("list")(catalogue.list_catalogue)
app.command("run", cls=run.RunCommand)(run.run_algorithms)
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


def _check_paths(words: Sequence[str]) -> None:
    """Raise ConfigError if the path of an output is empty, which would be the current folder."""
    for option, value in pairwise([*words, "-"]):
        name, equals, text = option.partition("=")
        if name in ("--out", "--html") and not (text if equals else value):
            raise ConfigError(f"{name} is empty: give the path of a file or a folder, such as {name} ./NAME")


def _explain_wrong_words(message: str, words: Sequence[str]) -> str:
    """Add to a message about options and arguments what the user may have meant, in our own words.

    >>> _explain_wrong_words("Missing option '--stream'.", ["run", "sine-2"])
    "Missing option '--stream'. Did you mean --stream sine-2?"
    >>> _explain_wrong_words("Invalid value for '--rounds': Input should be a valid integer, unable to ...", [])
    "Invalid value for '--rounds': must be a whole number"
    """
    message = re.sub(r"( Did you mean [^?]+\?)\1", r"\1", message)  # typer and click both suggest
    for pattern, text in _PYDANTIC_WORDS.items():  # recent versions of typer validate with pydantic
        message = re.sub(pattern, text, message)
    is_named = len(words) > 1 and not words[1].startswith("-")
    if message.startswith("Missing option '--stream'") and is_named:
        message = f"{message.rstrip('.')}. Did you mean --stream {words[1]}?"
    if message.startswith("Got unexpected extra argument"):
        command = " ".join(takewhile(str.isalpha, words[: 2 if words[0] == "deploy" else 1]))
        message = f"{message.rstrip('.')}: see `feddrift {command} --help`"
        if command == "list":
            message += "; `feddrift list` alone lists everything"
    return message


_PYDANTIC_WORDS = {
    "Value error, ": "",
    "Input should be a valid integer.*": "must be a whole number",
    "Input should be a valid number.*": "must be a number",
    "Input should be greater than or equal to": "must be at least",
    "Input should be less than or equal to": "must be at most",
    "Input should be": "must be",
}


def main() -> None:
    """Run the `feddrift` command, and exit with code 0, with 2 after bad input, or with 130 after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # commands that save their work set their own handler
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals without characters such as ±
    handler = RichHandler(console=console.err, show_time=False, show_path=False)
    handler.addFilter(_build_repeat_filter())
    logging.basicConfig(format="%(message)s", handlers=[handler])
    words = sys.argv[1:]
    try:
        _check_paths(words)
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except FeddriftError as error:
        code = print_error(str(error))
    except console.CommandLineError as error:
        code = print_error(_explain_wrong_words(error.format_message(), words))
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
