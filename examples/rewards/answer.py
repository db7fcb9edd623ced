"""Tagged output: `<think>…</think><answer>42</answer>`, compared with the scenario's `answer`.

Credit for parts of the way: the form, a number at all, the right one. `words` is a metric of weight 0.
"""

from rewards.checks import Checks
from rewards.parsers import format_share, number, reply, tagged

WEIGHTS = {"form": 0.2, "number": 0.2, "right": 0.6, "words": 0.0}


def reward(trace):
    text = reply(trace)
    given = number(tagged(text, "answer"))
    checks = Checks({name: WEIGHTS[name] for name in ("form", "number", "right")})
    checks.add("form", format_share(text, "think", "answer"))
    checks.add("number", given is not None)
    with checks.that("right"):
        assert given == trace["scenario"]["answer"], f"{given} is not it"
    return {**checks.scores, "words": len(text.split())}
