"""``fasttrack``: parse the verb, load its file, turn errors into exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.main

from fasttrack.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE, FasttrackError, UsageError

#: verb -> (module, function, one line of help). Modules are imported when their verb is used.
VERBS: dict[str, tuple[str, str, str]] = {
    "validate": ("fasttrack.cli.validate", "validate", "Run the experiment a manifest declares, and judge it."),
    "plan": ("fasttrack.cli.plan", "plan", "Print what a run would do, and what it cannot show."),
    "bundle": ("fasttrack.cli.bundle", "bundle", "Seal a finished run and bind it to a pull request."),
    "verify": ("fasttrack.cli.verify", "verify", "Check a bundle and recompute its verdict, offline."),
    "show": ("fasttrack.cli.show", "show", "Print a run or a bundle: gates, numbers, records."),
    "audit": ("fasttrack.cli.audit", "audit", "Look for synchronisation faults in compiled kernels."),
    "isolate": ("fasttrack.cli.isolate", "isolate", "Report what a diff touches outside its declared paths."),
    "schema": ("fasttrack.cli.schema", "schema", "Print the JSON schema of a file format."),
    "serve": ("fasttrack.cli.serve", "serve", "Serve the embedded engine, OpenAI-compatible."),
}


def build(verb: str | None) -> typer.Typer:
    """The command line with one verb loaded; the others are listed by their one-line help only."""
    app = typer.Typer(
        name="fasttrack",
        help="Evidence for model-specific inference optimisations: scope -> experiment -> bundle -> verdict.",
        epilog="Exit codes: 0 pass, 1 fail, 2 bad input, 3 not enough evidence, 4 internal error, 130 interrupted.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root(
        version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)] = False,
    ) -> None: ...

    for name, (module, function, text) in VERBS.items():
        if name == verb:
            app.command(name, help=text)(getattr(importlib.import_module(module), function))
        else:
            app.command(name, help=text)(_unloaded)
    return app


def _unloaded() -> None:  # stands for a verb in the list of verbs; never called
    raise AssertionError("verb was not loaded")


def _print_version(value: bool) -> None:
    if value:
        from fasttrack import __version__

        typer.echo(f"fasttrack {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits the process."""
    signal.signal(signal.SIGTERM, _interrupt)  # an orderly end, like Ctrl-C: journalled, and nothing half-made is left
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    arguments = arguments or ["--help"]
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        _check_surroundings(arguments)
        result = typer.main.get_command(build(verb)).main(args=arguments, prog_name="fasttrack", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as error:
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("fasttrack: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except FasttrackError as error:
        print(f"fasttrack: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # no file system has such a name
            print(f"fasttrack: {str(error.filename)[:60]}...: name too long; expected a shorter one", file=sys.stderr)
            return EXIT_USAGE
        message = getattr(error, "format_message", None)  # a usage error of the command-line parser
        if message is not None:
            print(f"fasttrack: {message()}", file=sys.stderr)
            return int(getattr(error, "exit_code", EXIT_USAGE))
        print(
            f"fasttrack: internal error: {type(error).__name__}: {error}; traceback in {_write_traceback()}",
            file=sys.stderr,
        )
        return EXIT_INTERNAL


def _check_surroundings(arguments: Sequence[str]) -> None:
    """What no command can work with: an argument that cannot be recorded, a current folder that is gone."""
    for number, argument in enumerate(arguments, start=1):
        if not _is_text(argument):
            raise UsageError(f"argument {number} ({argument!a}) is not UTF-8", expected="text that a record can hold")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted", expected="`cd` into one that exists") from None


def _is_text(argument: str) -> bool:
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _write_traceback() -> str:
    handle, path = tempfile.mkstemp(prefix="fasttrack-", suffix=".log", text=True)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return path
