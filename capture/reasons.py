"""Why tokens are not trained and why branches break: closed sets, each reason with a sentence for people."""

from typing import Final

PROVIDER: Final = "provider"
ERROR: Final = "error"
UNPARSABLE: Final = "unparsable"
PARTIAL: Final = "partial"
NO_TOKEN_IDS: Final = "no_token_ids"
LENGTH_MISMATCH: Final = "length_mismatch"
BAD_LOGPROBS: Final = "bad_logprobs"
REDACTED: Final = "redacted"
MEDIA: Final = "media"
GRAMMAR: Final = "grammar"
SAMPLING: Final = "sampling"
N_CHOICES: Final = "n_choices"
TEMPERATURE_ZERO: Final = "temperature_zero"
NO_VERSION: Final = "no_version"
OTHER_POLICY: Final = "other_policy"
LATE: Final = "late"
UNDELIVERED: Final = "undelivered"
SUPERSEDED: Final = "superseded"
JUDGE: Final = "judge"

UNTRAINABLE: Final[dict[str, str]] = {
    PROVIDER: "The call went to a model that is not being trained.",
    ERROR: "The call failed: the upstream or Hone answered it with an error.",
    UNPARSABLE: "The request or the response is not what the protocol says, so nothing was read from it.",
    PARTIAL: "The engine did not finish the response: the stream was cut or the generation aborted.",
    NO_TOKEN_IDS: "The engine's response has no token ids, so what was sampled is not known exactly.",
    LENGTH_MISMATCH: "Token ids, logprobs and the engine's own token count disagree.",
    BAD_LOGPROBS: "A logprob is missing, not finite or above zero.",
    REDACTED: "Redaction changed the stored text, so the ids that were sampled were not kept.",
    MEDIA: "The prompt holds images, sound or video, which the learner does not see.",
    GRAMMAR: "A grammar (forced tool choice, response format, structured output) masked the sampling.",
    SAMPLING: "A parameter other than temperature shaped the sampling (top_p, penalties, bias, seed).",
    N_CHOICES: "The call asked for more than one choice.",
    TEMPERATURE_ZERO: "Temperature 0 is greedy: it has no distribution to learn from.",
    NO_VERSION: "It is not known which version of the policy answered.",
    OTHER_POLICY: "The call went to another policy than its rollout's.",
    LATE: "The call was committed after its rollout was sealed.",
    UNDELIVERED: "The agent hung up before it got the response, and no later call builds on it.",
}
"""Reason -> sentence."""

NOT_FOR_TRAINING: Final[dict[str, str]] = {
    "eval": "The rollout was an evaluation.",
    "observe": "The rollout was only observed.",
    SUPERSEDED: "The client repeated the request and went on with the later response.",
}
"""Reason -> sentence; these tokens were never meant to be trained."""

DROPPED: Final[dict[str, str]] = {
    "failed": "The infrastructure failed, not the agent; the runner may repeat the rollout.",
    "reward_error": "The reward script broke; its traceback is kept with the rollout.",
    "ungrouped": "The rollout belongs to no group, so there is nothing to compare its reward with.",
    "group_too_small": "Fewer than two members of the group have a reward.",
    "not_in_group": "The group closed without this rollout.",
    "agent_failure": "The agent crashed, timed out or hit a cap, and `rewards.on_agent_failure` is `drop`.",
    "group_deadline": "The group closed at its deadline while this rollout was still running.",
    "replaced": "Another attempt of the same rollout took its place.",
    "stale": "The policy has moved on too far since these tokens were sampled.",
    "zero_variance": "All rewards of its group are equal, and `train.zero_variance_filter` is on.",
    "too_hard": "The mean reward of its group is below `train.group_reward_min`.",
    "too_easy": "The mean reward of its group is above `train.group_reward_max`.",
    "overlong": "A reply or its context was cut off at the limit, and `train.overlong_filter` is on.",
    JUDGE: "It is a judge's own: a reward script asked it about another rollout.",
    "nonfinite": "The batch gave a gradient that is not finite, twice.",
    "out_of_memory": "One of its batch's samples alone does not fit into the learner's memory.",
}
"""Reasons for which rollouts are dropped -> sentence; ending a run and closing a group may give others."""

ROOT: Final = "root"
SUB_AGENT: Final = "sub_agent"
REPEATED: Final = "repeated"
BRANCHED: Final = "branched"
NO_TOKENS: Final = "no_tokens"
RETOKENISED: Final = "retokenised"
STRIPPED_REASONING: Final = "stripped_reasoning"
CHANGED_TOOLS: Final = "changed_tools"
NEW_SYSTEM_PROMPT: Final = "new_system_prompt"
HANDOFF: Final = "handoff"
REWRITTEN_RESPONSE: Final = "rewritten_response"
COMPACTED: Final = "compacted"
REWRITTEN_HISTORY: Final = "rewritten_history"

FORKS: Final[dict[str, str]] = {
    ROOT: "It is the first call of the rollout whose tokens are known.",
    SUB_AGENT: "It shares no message with an earlier call: a sub-agent, a new task, or all of it summarised.",
    REPEATED: "It asks what was asked before: a retry, a parallel attempt or a step back.",
    BRANCHED: "It goes on from an earlier response in another way than the calls since did.",
    NO_TOKENS: "The tokens of its prompt, or of the response that it goes on with, are not known.",
    RETOKENISED: "It goes on with the same messages, but their tokens are not the sampled ones.",
    STRIPPED_REASONING: "It goes on with the same messages, without the reasoning that was sampled.",
    CHANGED_TOOLS: "The tools in the prompt changed.",
    NEW_SYSTEM_PROMPT: "The system prompt changed.",
    HANDOFF: "The system prompt and the tools changed: another agent took over.",
    REWRITTEN_RESPONSE: "The agent replayed an earlier response in other words than those that were sampled.",
    COMPACTED: "Earlier messages were left out or summarised: the conversation became shorter.",
    REWRITTEN_HISTORY: "Earlier messages were changed or left out.",
}
"""Why a call begins a branch: it continues no earlier one, or one that was continued before -> sentence."""
