"""`hone`: one module of `hone.cli` for each verb, imported only when it is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence

VERBS = {
    "init": "write a commented hone.toml",
    "up": "serve: engine, proxy and control, without training",
    "train": "train: learner and runner beside a running `hone up`, or everything",
    "eval": "run the agent on evaluation scenarios and report its scores",
    "sft": "fine-tune the adapter on stored rollouts or on a file of conversations",
    "demo": "train the tic-tac-toe agent end to end and show what it learned",
    "status": "one screen, and one sentence on what training waits for",
    "doctor": "check this machine and the settings",
    "rollouts": "look at stored rollouts: ls, show, explain, export",
    "reward": "a reward script on stored rollouts: test, rescore",
    "scenarios": "make a scenario set of what agents asked: from-rollouts",
    "adapters": "the versions of the policy, and which one is served: ls, promote, rollback, export",
    "keys": "make API keys for the proxy, and list those that are configured: new, ls",
    "proxy": "run the proxy alone",
    "control": "run control alone: ingest, seal, score, group",
    "learn": "run the learner alone",
    "runner": "run the runner alone",
    "engine": "become vLLM with the settings' command line",
}


def usage() -> str:
    """What `hone --help` prints."""
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name:<{width}}{text}" for name, text in VERBS.items())
    return f"usage: hone VERB [options]\n\n{verbs}\n\n`hone VERB --help` lists a verb's options.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit status. Errors that Hone raises on purpose become one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(version("hone"))
        return 0
    verb = words[0]
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"hone: no verb {verb!r}{hint}\n\n{usage()}")
        return 2
    return run_verb(verb, words[1:])


OF_THE_LEARNER = ("torch", "transformers", "peft", "safetensors", "huggingface_hub", "matplotlib")
"""Packages that only the extra `learner` brings."""


def run_verb(verb: str, words: Sequence[str]) -> int:
    """Parse the verb's own options and run it."""
    module = importlib.import_module(f"hone.cli.{verb}")
    parser = argparse.ArgumentParser(prog=f"hone {verb}", description=VERBS[verb])
    module.add_arguments(parser)
    arguments = parser.parse_args(words)
    from capture.errors import HoneError

    try:
        return int(module.run(arguments))
    except HoneError as error:
        sys.stderr.write(f"hone {verb}: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in OF_THE_LEARNER:
            raise
        sys.stderr.write(f"hone {verb}: {name} is not installed; pip install 'hone[learner]' brings it\n")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
