"""The program: its commands' common manners, which are exit statuses and errors in one line."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from strideweave import __version__
from strideweave.errors import FormatError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BROKEN", "INTERRUPTED", "UNUSABLE", "Command", "app", "complain", "help_of"]

BROKEN = 1
"""Exit status: a check did not hold, or a file is not what it should be."""

UNUSABLE = 2
"""Exit status: the arguments, or what they name, cannot be used, or the system refused."""

INTERRUPTED = 130
"""Exit status: interrupted from the keyboard."""

_CLOSED_PIPE = 141  # whoever read the output has gone, as a shell says of a program that SIGPIPE has ended

# What the library says of its arguments, which are options here.
_KEYWORD = re.compile(r"\b(tensor|format|dtype|shape|offset)=(?![\w'\"])")

# From the public error up, since typer has brought its own copy of click from some version on.
_USAGE_ERROR, _ANY_ERROR = cast("Sequence[type[Exception]]", typer.BadParameter.__mro__[1:3])


class Command(TyperCommand):
    """A command whose errors are one line on standard error and an exit status, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            complain(ctx.command_path, "interrupted")
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _stop_printing(1)
            raise typer.Exit(_CLOSED_PIPE) from error
        except FormatError as error:
            complain(ctx.command_path, error)
            raise typer.Exit(BROKEN) from error
        except (OSError, ImportError, ValueError, NotImplementedError, MemoryError) as error:
            complain(ctx.command_path, error)
            raise typer.Exit(UNUSABLE) from error


class _Program(TyperGroup):
    """The group of all commands; says in one line what is wrong with arguments."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command that the arguments name; raises ``SystemExit`` with its status."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what this terminal has not
        try:
            ended = super().main(*arguments, **(options | {"standalone_mode": False}))
        except _ANY_ERROR as error:
            _refuse(error)
        except (typer.Abort, KeyboardInterrupt):
            complain(self.name or "strideweave", "interrupted")
            sys.exit(INTERRUPTED)
        except SystemExit as error:
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            # What typer prints itself, such as a help: of a closed pipe it says 1, which is a check that failed here.
            _stop_printing(1)
            sys.exit(_CLOSED_PIPE)
        except OSError as error:  # a help that could not be printed
            complain(self.name or "strideweave", error)
            sys.exit(UNUSABLE)
        sys.exit(ended if isinstance(ended, int) else 0)


def complain(command: str, error: object) -> None:
    """Print one line about what went wrong; where that cannot be written either, the exit status alone says it."""
    try:
        print(f"{command}: {printable(_in_one_line(error))}", file=sys.stderr, flush=True)
    except OSError:
        _stop_printing(2)


def _stop_printing(descriptor: int) -> None:
    """Send the rest of standard output, or error, nowhere, so that the last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def help_of(command: Callable[..., object]) -> str:
    """The docstring of a command, a line for each paragraph: typer would keep the lines of the source."""
    text = inspect.getdoc(command) or ""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _refuse(error: Any) -> NoReturn:
    """Say what is wrong with the arguments; no arguments at all are a question for help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(UNUSABLE)
    context = getattr(error, "ctx", None)
    command = "strideweave" if context is None else context.command_path
    hint = f" (see {command} --help)" if isinstance(error, _USAGE_ERROR) else ""
    complain(command, error.format_message().rstrip(".") + hint)
    sys.exit(UNUSABLE)


def _in_one_line(error: object) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{os.fspath(error.filename)!r}: {error.strerror}"
    elif isinstance(error, MemoryError) and not text:
        text = "there is not enough memory"
    notes = getattr(error, "__notes__", ())
    line = " ".join("; ".join([text, *notes]).split())
    return _KEYWORD.sub(r"--\1", line) if isinstance(error, ValueError) else line


app = typer.Typer(
    name="strideweave",
    cls=_Program,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Tensors larger than memory, served tile by tile.",
    epilog="Exit status: 0 done, and everything checked holds; 1 a check does not hold, or a file is not what it "
    "should be; 2 the arguments, or what they name, cannot be used; 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def _strideweave(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(__version__)
        raise typer.Exit
