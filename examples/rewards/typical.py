"""A typical reward: an answer, a few tool calls, no dawdling, no tool twice in a row."""

from itertools import pairwise


def reward(trace):
    turns = trace["turns"]
    replies = [turn for turn in turns if turn["role"] == "assistant"]
    tools = [call["name"] for turn in replies for call in turn.get("tool_calls", [])]

    score = 0.0
    if any(turn.get("content") for turn in replies):
        score += 0.4  # it replied
    if 1 <= len(tools) <= 6:
        score += 0.3  # it used its tools, and did not overdo it
    if len(turns) <= 10:
        score += 0.3  # it came to the point
    for before, after in pairwise(tools):
        if before == after:
            score -= 0.1  # the same tool again
    return max(0.0, min(1.0, score))
