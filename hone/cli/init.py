"""`hone init`: a commented hone.toml."""

import argparse
from pathlib import Path

TEMPLATE = Path(__file__).parent.parent / "template.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("path", nargs="?", default="hone.toml", help="where to write it (default: hone.toml)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(arguments: argparse.Namespace) -> int:
    """Write the template; refuses to replace a file."""
    from capture.errors import ConfigError

    path = Path(arguments.path)
    try:
        with path.open("w" if arguments.force else "x") as file:
            file.write(TEMPLATE.read_text())
    except FileExistsError:
        raise ConfigError(f"{path} is there already; --force replaces it") from None
    print(
        f"Wrote {path}. Next: name your base model, agent, scenarios and reward script in it; `hone train`."
    )
    return 0
