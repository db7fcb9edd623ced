"""What several verbs share: where the settings are, and how results are printed."""

import argparse
import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from capture.errors import Conflict, NotFound
from capture.sqlite import SqliteStore
from capture.store import Store
from hone.config import Config, load
from hone.state import Kind, PartState, running, state_path
from hone.supervisor import Part, Supervisor

if TYPE_CHECKING:
    from rich.text import Text

DEFAULT_CONFIG = "hone.toml"
PROGRESS_S = 5.0  # between lines of progress where stderr is no terminal; there: a tenth of it


def add_config(parser: argparse.ArgumentParser) -> None:
    """`--config`."""
    parser.add_argument(
        "-c", "--config", default=DEFAULT_CONFIG, metavar="FILE", help="settings (default: hone.toml)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_out(parser: argparse.ArgumentParser) -> None:
    """`--out` and `--force` of a file that is written."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write it")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def positive(text: str) -> int:
    """A whole number from 1 on, as an option's type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


@contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """A function to tell a count to while long work goes on: now and then it stands on stderr."""
    terminal = sys.stderr.isatty()
    told = time.monotonic()
    shown = False

    def tell(count: int) -> None:
        nonlocal told, shown
        if time.monotonic() - told < (PROGRESS_S / 10 if terminal else PROGRESS_S):
            return
        told, shown = time.monotonic(), True
        sys.stderr.write(f"\r{count} {what} " if terminal else f"{count} {what}\n")
        sys.stderr.flush()

    try:
        yield tell
    finally:
        if shown and terminal:
            sys.stderr.write("\n")


def load_config(arguments: argparse.Namespace) -> Config:
    """The settings that `--config` and the environment make."""
    return load(Path(arguments.config), os.environ)


def open_store(config: Config, *, create: bool = False) -> Store:
    """The store of these settings; `NotFound` if nothing was ever stored."""
    path = Path(config.store.path)
    if not create and not path.exists():
        raise NotFound(f"no store at {path}: nothing has run with these settings yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    return SqliteStore(path)


def print_json(value: Any) -> None:
    """One JSON document, indented."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    sys.stdout.flush()


def print_lines(lines: Iterable["Text"], *, pager: bool) -> None:
    """Styled lines: in colour on a terminal unless `NO_COLOR` is set, plain text elsewhere.

    With `pager`, what does not fit on the terminal goes to `$PAGER` (default: `less -FRX`).
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    text = Text("\n").join(lines)
    command = shlex.split(os.environ.get("PAGER", "less"))
    fits = text.plain.count("\n") + 1 < console.height
    if not pager or not console.is_terminal or not sys.stdin.isatty() or fits or not command:
        console.print(text)
        return
    with console.capture() as captured:
        console.print(text)
    environ = {"LESS": "-FRX", **os.environ}
    try:
        subprocess.run(command, input=captured.get().encode(), env=environ, check=False)
    except FileNotFoundError:
        console.print(text)


def on_signals(stop: Callable[[], object]) -> None:
    """Call `stop` on Ctrl-C and SIGTERM, in the running loop."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)


def log_to_stderr() -> None:
    """Log lines of a part; its supervisor keeps them in a file."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def refuse_second(directory: Path, kinds: Sequence[Kind]) -> None:
    """`Conflict` if a supervisor of one of these kinds runs in the directory."""
    for kind in kinds:
        state = running(directory, kind)
        if state is not None:
            raise Conflict(f"`hone {kind}` runs already in {directory} (pid {state.pid})")


def supervise(config: Config, kind: Kind, parts: Sequence[Part]) -> Supervisor:
    """A supervisor of these parts in the run's directory; `Conflict` if one of its kind runs there."""
    directory = Path(config.run.dir)
    refuse_second(directory, ("up", "train") if kind == "up" else ("train",))
    return Supervisor(
        parts,
        kind=kind,
        state_file=state_path(directory, kind),
        log_dir=directory / "logs",
        config=str(config.path),
        until_done=False,  # the last calls are still to be read when learner and runner are through
        log_bytes_max=config.run.log_bytes_max,
    )


async def announce(supervisor: Supervisor, ready: str) -> None:
    """Say when a part changes its state, and once that all are ready. Until cancelled."""
    told: dict[str, PartState] = {}
    while True:
        parts = supervisor.state().parts
        for part in parts:
            if part.state not in ("waiting", told.get(part.name)):
                why = f" (exit code {part.exit_code}, see {part.log})" if part.state == "backoff" else ""
                print(f"{part.name}: {part.state}{why}", file=sys.stderr, flush=True)
                told[part.name] = part.state
        if ready and all(part.state in ("ready", "done") for part in parts):
            print(ready, file=sys.stderr, flush=True)
            ready = ""
        await asyncio.sleep(0.2)
