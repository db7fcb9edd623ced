"""A judge's verdict beside a plain check. The judge answers under the name `judge` in [routes], never the
policy; verdicts are kept, so scoring again costs nothing."""

import asyncio
from pathlib import Path

from rewards.judge import Judge
from rewards.parsers import reply

WEIGHTS = {"helpful": 0.8, "short": 0.2}
HELPFUL = Judge(
    "Does the reply solve what the user asked for, politely and without inventing anything?",
    votes=3,
    cache=Path(__file__).with_name("verdicts"),
)


async def reward(trace):
    asked = [turn["content"] for turn in trace["turns"] if turn["role"] == "user"]
    verdict = await asyncio.to_thread(HELPFUL, asked=asked, reply=reply(trace))
    return {"helpful": verdict.score, "short": float(len(reply(trace)) < 1_000)}
