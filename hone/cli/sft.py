"""`hone sft`: supervised fine-tuning of the adapter, on stored rollouts or on a file of conversations."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hone.cli.common import add_config, add_json, load_config, open_store, positive, print_json, progress
from hone.cli.selection import add_best_of, add_filters, filters
from hone.config import Config

if TYPE_CHECKING:
    from learner.lessons import Lesson
    from learner.sft import Progress, Report, SftSettings

PROGRESS_S = 2.0  # between lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_config(parser)
    add_json(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="of the adapter; must not exist"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="conversations, as `hone rollouts export --format messages`"
    )
    parser.add_argument("--epochs", type=positive, metavar="N", help="passes over everything (default: 2)")
    parser.add_argument("--lr", type=float, help="learning rate at the start (default: 2e-4)")
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="tokens of one step, context included (default: 16384)",
    )
    parser.add_argument("--seed", type=int, help="of the order and of what is held out (default: 42)")
    add_filters(parser)
    add_best_of(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, and write the adapter's directory; Ctrl-C leaves nothing behind."""
    from capture.errors import ConfigError
    from learner.sft import refuse_existing
    from learner.sft import run as train
    from learner.update import Abandoned

    config = load_config(arguments)
    if config.capture_only:
        raise ConfigError("policy.base_model is not set: there is no model to train")
    settings = _settings(arguments)
    refuse_existing(arguments.out)
    signalled: list[int] = []
    left_out: list[str] = []
    lessons = (
        _of_file(config, arguments, left_out) if arguments.data else _of_rollouts(config, arguments, left_out)
    )
    found = list(lessons)
    for line in left_out:
        print(line, file=sys.stderr)
    before = [signal.signal(number, lambda got, _: signalled.append(got)) for number in _SIGNALS]
    try:
        report = train(
            config.learner,
            settings,
            config.policy.name,
            found,
            arguments.out,
            lambda: bool(signalled),
            _Teller(),
        )
    except Abandoned as error:
        print(f"hone sft: {error}", file=sys.stderr)
        return 130
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    if arguments.json:
        print_json(report)
    print(_told(report), file=sys.stderr)
    return 0


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _settings(arguments: argparse.Namespace) -> "SftSettings":
    from capture.errors import ConfigError
    from learner.sft import SftSettings

    given = {name: getattr(arguments, name) for name in ("epochs", "lr", "batch_tokens", "seed")}
    try:
        return msgspec.convert(
            {name: value for name, value in given.items() if value is not None}, SftSettings
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _of_rollouts(config: Config, arguments: argparse.Namespace, told: list[str]) -> Iterator["Lesson"]:
    """What the policy sampled in the rollouts that fit, as the call graph says; no other policy's tokens."""
    from capture.errors import ConfigError
    from hone.traffic.export import LeftOut, chosen, nothing_left, own_samples
    from learner.lessons import lesson

    said = filters(arguments)
    if said.policy not in (None, config.policy.name):
        raise ConfigError(f"--policy {said.policy}: these settings train {config.policy.name}")
    said = msgspec.structs.replace(said, policy=config.policy.name)
    left_out = LeftOut()
    store = open_store(config)
    lessons = 0
    try:
        with progress("rollouts looked at") as seen:
            for rollout in chosen(store, said, left_out, best_of=arguments.best_of, seen=seen):
                scenario, samples = own_samples(store, rollout, left_out)
                left_out.rollouts["nothing"] += not samples
                for sample in samples:
                    lessons += 1
                    yield lesson(scenario, sample)
    finally:
        store.close()
    if not lessons:
        raise nothing_left(said, left_out)
    told += left_out.told()


def _of_file(config: Config, arguments: argparse.Namespace, told: list[str]) -> Iterator["Lesson"]:
    from capture.errors import ConfigError, NotFound
    from learner.lessons import lesson
    from learner.rendering import LEFT_OUT, Renderer, read_conversations

    if str(filters(arguments)) or arguments.best_of:
        raise ConfigError("--data has its own conversations: filters choose among stored rollouts")
    renderer = Renderer(config.policy.base_model)
    lessons = 0
    for conversation in read_conversations(arguments.data):
        for sample in renderer.samples(conversation):
            lessons += 1
            yield lesson(conversation.scenario, sample)
    for reason, count in renderer.left_out.most_common():
        error = f": {renderer.error}" if reason == "template_error" else ""
        told.append(f"left out: {count} {reason} ({LEFT_OUT[reason]}{error})")
    if renderer.split:
        told.append(
            f"{renderer.split} conversations became several samples: the template rewrites earlier turns"
        )
    if not lessons:
        raise NotFound("; ".join([f"{arguments.data} has nothing to learn from", *told]))


class _Teller:
    """Progress on stderr: every measurement of what is held out, and a step now and then."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, at: "Progress") -> None:
        if at.held_out is None and time.monotonic() - self._last < PROGRESS_S:
            return
        self._last = time.monotonic()
        loss = "" if at.loss is None else f"  loss {at.loss:.4f}"
        held_out = "" if at.held_out is None else f"  held out {at.held_out:.4f}"
        print(f"step {at.step}  epochs {at.epochs:.2f}{loss}{held_out}", file=sys.stderr, flush=True)


def _told(report: "Report") -> str:
    from learner.sft import LEFT_OUT

    lines = [f"left out: {count} {reason} ({LEFT_OUT[reason]})" for reason, count in report.left_out.items()]
    held_out = "nothing held out"
    if report.held_out_losses:
        first, *_, last = report.held_out_losses
        held_out = f"held out ({report.held_out_samples}) {first:.4f} -> {last:.4f}"
    losses = " -> ".join(f"{loss:.4f}" for loss in dict.fromkeys((report.losses[0], report.losses[-1])))
    lines += [
        f"{report.steps} steps on {report.tokens} tokens of {report.samples} samples, {report.seconds:.1f} s",
        f"loss {losses}, {held_out}: {report.out}",
    ]
    return "\n".join(lines)
