"""`hone engine`: becomes vLLM, started as the settings say."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from hone.cli.common import add_config, load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by vLLM; returns only with `--print`."""
    from hone.engine import launch, offline
    from hone.hardware import cores

    config = load_config(arguments)
    assert config.engine.device != "auto", "resolved while loading"
    start = launch(
        config.policy,
        config.engine,
        lora_rank=config.learner.lora_rank,
        targets=config.learner.targets,
        hardware=config.engine.device,
        cores=cores(),
        python=sys.executable,
        render=config.capture.continuity != "off",
    )
    env = offline(start.env, Path(config.policy.base_model).is_dir())
    if not arguments.print:
        os.makedirs(config.engine.adapter_dir, exist_ok=True)
        os.execvpe(start.command[0], start.command, {**env, **os.environ})
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    print(" ".join([*settings, shlex.join(start.command)]))
    return 0
