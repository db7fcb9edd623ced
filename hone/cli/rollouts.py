"""`hone rollouts`: what is stored of the agents' attempts, and why each did or did not train."""

import argparse
import itertools
import re
import sys
from collections.abc import Callable

import msgspec

from capture.store import Store
from capture.types import Rollout
from hone.cli.common import (
    add_config,
    add_json,
    add_out,
    load_config,
    open_store,
    positive,
    print_json,
    print_lines,
    progress,
)
from hone.cli.selection import add_best_of, add_filters, filters
from hone.config import Config
from hone.printing import redacted
from hone.traffic.filters import matching

CALLS_SHOWN = 50

LS = "one line a rollout, newest last"
SHOW = "one rollout's conversation, call by call"
EXPORT = "stored rollouts as lines for supervised fine-tuning"
EXPLAIN = "why a rollout did or did not train: one sentence, then what it rests on"
ID = "id of a rollout or of one of its calls, or the beginning of one"

SHOW_HELP = """\
one rollout's conversation, call by call: of each call what was new in it, the answer in the colour of what
became of its tokens, where it stands in the call graph, and why it began a branch of its own

--json prints {explanation, rollout, calls, waiting}: `explanation` is what `hone rollouts explain --json`
prints; a call is {call, like, like_messages, messages, response, tokens}: `call` as in the explanation,
`like` the number of the call that said its first `like_messages` messages before, `messages` the others,
and with --tokens a token is {id, text, logprob, mask, version, owner, branch, advantage}: mask 1 where it
has loss in the sample number `branch`, owner the call that it is trained for.
"""

EXPLAIN_HELP = """\
why a rollout did or did not train: one sentence, then what it rests on

--json prints {rollout_id, kind, sentence, setting, setting_value, mode, passive, state, status, policy,
versions, run_id, scenario_id, headless, reward, scores, reward_error, advantage, staleness, tokens, timeline,
group, batch, calls, waiting, reasons}. `kind` says which sentence it is, `setting` which setting would
change it; `tokens` adds up to `tokens.sampled`; a call's `fate` is trained, zero_advantage, pending, eval,
observe, a drop reason or an untrainable reason, and `reasons` has the sentences.
"""


EXPORT_HELP = """\
stored rollouts as lines for supervised fine-tuning, in a file that is there only once it is whole

messages: one line for each conversation, {messages, tools, reward, scenario_id, rollout_id, call_id, model,
status}, the form with tools that SFT trainers take; the last message is the assistant's. tokens: one line for
each sample, {rollout_id, token_ids, loss_mask, sampled_logprobs, spans, scenario_id, reward, status}, with
loss where the token was sampled and may be trained. What was left out is counted on stderr, with --json also
on stdout.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="ls|show|explain|export")
    listing = verbs.add_parser("ls", help=LS, description=LS)
    listing.add_argument("--limit", type=positive, default=50)
    listing.add_argument("--after", metavar="ID", help="page: only ids after this one")
    add_filters(listing)
    raw = argparse.RawDescriptionHelpFormatter
    show = verbs.add_parser("show", help=SHOW, description=SHOW_HELP, formatter_class=raw)
    show.add_argument("--tokens", action="store_true", help="each sampled token: mask, logprob, owner")
    show.add_argument(
        "--calls",
        type=call_numbers,
        metavar="FROM-TO",
        help=f"only these: 7, 7-12, 7-; printed without it: the first {CALLS_SHOWN}",
    )
    show.add_argument("--chars", type=int, default=2_000, help="most of a message (default: 2000; 0: all)")
    explain = verbs.add_parser("explain", help=EXPLAIN, description=EXPLAIN_HELP, formatter_class=raw)
    for sub in (show, explain):
        sub.add_argument("id", metavar="ROLLOUT", help=ID)
        sub.add_argument("--no-pager", action="store_true", help="print what does not fit on the screen too")
    export = verbs.add_parser("export", help=EXPORT, description=EXPORT_HELP, formatter_class=raw)
    add_filters(export)
    export.add_argument("--format", choices=("messages", "tokens"), required=True)
    add_out(export)
    add_best_of(export)
    for sub in (listing, show, explain, export):
        add_config(sub)
        add_json(sub)


def run(arguments: argparse.Namespace) -> int:
    """List rollouts, show one, explain one, or write many to a file."""
    config = load_config(arguments)
    store = open_store(config)
    verbs: dict[str, Callable[[Config, Store, argparse.Namespace], int]] = {
        "ls": _list,
        "show": _show,
        "explain": _explain,
        "export": _export,
    }
    try:
        return verbs[arguments.what](config, store, arguments)
    finally:
        store.close()


def call_numbers(text: str) -> range:
    """`7`, `7-12` or `7-` as a range of call numbers."""
    found = re.fullmatch(r"(\d+)(?:(-)(\d*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 7, 7-12 or 7-")
    first = int(found[1])
    last = first if not found[2] else int(found[3]) if found[3] else sys.maxsize - 1
    return range(first, last + 1)


def _list(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    fitting = matching(store, filters(arguments), after=arguments.after)
    found = list(itertools.islice(fitting, arguments.limit))
    if arguments.json:
        print_json([_public(rollout) for rollout in found])
        return 0
    for rollout in found:
        reward = "" if rollout.reward is None else f"{rollout.reward:.3f}"
        reason = rollout.drop_reason or rollout.status or ""
        version = "-" if rollout.policy_version is None else f"v{rollout.policy_version}"
        print(
            f"{rollout.id}  {rollout.mode:<8}{rollout.state:<13}{version:<5}"
            f"  {rollout.call_count:>3} calls  {reward:>7}  {rollout.scenario_id or ''}  {reason}"
        )
    return 0


def _explain(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    from hone.explain.explanation import explain
    from hone.explain.look import look
    from hone.explain.screen import explained

    facts, _ = look(store, arguments.id, redacted(config.sections()))
    explanation = explain(facts)
    if arguments.json:
        print_json(explanation)
    else:
        print_lines(explained(explanation), pager=not arguments.no_pager)
    return 0


def _export(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    from hone.traffic.export import export

    with progress("rollouts looked at") as seen:
        summary = export(
            store,
            filters(arguments),
            arguments.format,
            arguments.out,
            best_of=arguments.best_of,
            force=arguments.force,
            seen=seen,
        )
    if arguments.json:
        print_json(summary)
    wrote = f"{summary.lines} lines of {summary.rollouts} rollouts: {summary.out}"
    print("\n".join([wrote, *summary.left_out.told()]), file=sys.stderr)
    return 0


def _show(config: Config, store: Store, arguments: argparse.Namespace) -> int:
    from hone.explain.conversation import turns
    from hone.explain.explanation import explain
    from hone.explain.look import look
    from hone.explain.screen import head, sentence, unread
    from hone.explain.tokenizer import no_text, token_texts
    from hone.explain.transcript import conversation, cut_off, without_texts

    facts, calls = look(store, arguments.id, redacted(config.sections()))
    explanation = explain(facts)
    wanted = arguments.calls or range(1, len(calls) + 1 if arguments.json else CALLS_SHOWN + 1)
    base_model, texts = str(facts.setting("policy.base_model") or ""), None
    if arguments.tokens:
        texts = token_texts(base_model, (id for call in calls for id in call.sampled_ids)) or no_text
    found = turns(calls, facts.calls, numbers=wanted, token_text=texts, advantage=explanation.advantage)
    if arguments.json:
        rollout = _public(facts.rollout)
        shown = {"explanation": explanation, "rollout": rollout, "calls": found}
        print_json({**shown, "waiting": facts.history.waiting})
        return 0
    lines = [
        sentence(explanation),
        *head(explanation),
        *conversation(found, chars_max=max(0, arguments.chars), tokens=arguments.tokens),
        *unread(facts.history.waiting),
        *(without_texts(base_model) if texts is no_text else ()),
        *cut_off(len(found), len(calls)),
    ]
    print_lines(lines, pager=not arguments.no_pager)
    return 0


def _public(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, secret_hash=None)
