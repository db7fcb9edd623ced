"""`hone learn`: the learner alone. The only process with torch."""

import argparse
import os
import signal
import time
from pathlib import Path

from hone.cli.common import add_config, load_config, log_to_stderr, open_store

LOOK_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    parser.add_argument("--run", help="run to train (default: the newest that has not ended)")


def run(arguments: argparse.Namespace) -> int:
    """Train until `steps_max`, the end of the run, SIGTERM or Ctrl-C."""
    from hone.faults import killer
    from hone.start import start_run
    from hone.training import choose_run, learner_should_stop
    from learner.train import run as train

    log_to_stderr()
    config = load_config(arguments)
    store = open_store(config, create=True)
    run_id = choose_run(store, config.policy.name, arguments.run)
    start_run(config, store, run_id)
    signalled: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signalled.append(received))
    looked = 0.0
    ending = False

    def should_stop() -> bool:
        nonlocal looked, ending
        if time.monotonic() - looked > LOOK_S:
            ending = learner_should_stop(store, run_id)
            looked = time.monotonic()
        return ending or bool(signalled)

    try:
        train(
            config.learner,
            Path(config.store.path),
            run_id,
            config.policy.name,
            should_stop,
            on_point=killer(os.environ, "learn"),
        )
    finally:
        store.close()
    return 0
