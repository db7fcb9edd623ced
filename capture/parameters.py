"""What each parameter of a chat completion does to the distribution that tokens are sampled from. Pure.

The learner recomputes softmax(logits / T) and nothing else. So each parameter that vLLM 0.32 knows is
judged here, once: in training rollouts the proxy forwards what leaves that distribution alone and takes out
the rest, and no call is trained that was sampled with what distorts it.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

PROMPT: Final = frozenset(
    {
        "model",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
"""They make the prompt; the engine reports its ids, whatever they are."""

STOPS: Final = frozenset(
    {"stop", "stop_token_ids", "max_tokens", "max_completion_tokens", "repetition_detection"}
)
"""They end the response after a token that was sampled like any other; the ids go up to that token."""

FORM: Final = frozenset(
    {
        "stream",
        "stream_options",
        "stream_interval",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "user",
        "cache_salt",
    }
)
"""They say how the answer is written, or nothing that the engine reads."""

GRAMMARS: Final = frozenset({"tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"})
"""Some of their values, and `strict` in a tool, mask the sampling: such a call is served, not trained."""

FORWARDED: Final = PROMPT | STOPS | FORM | GRAMMARS | {"temperature", "n"}
"""What a training request may carry. `temperature` is set, `n` must be 1."""

TEMPERATURE_MIN: Final = 0.01
"""Below it vLLM samples at 0.01, or greedily."""


class Distortion(msgspec.Struct, frozen=True):
    """Why tokens that were sampled with a parameter are not trained."""

    why: str
    neutral: tuple[Any, ...] = (None,)  # values that do nothing


DISTORTING: Final[Mapping[str, Distortion]] = {
    "top_p": Distortion("cuts off unlikely tokens", (1, None)),
    "top_k": Distortion("cuts off unlikely tokens", (0, -1, None)),
    "min_p": Distortion("cuts off unlikely tokens", (0, None)),
    "presence_penalty": Distortion("lowers tokens that were there before", (0, None)),
    "frequency_penalty": Distortion("lowers tokens that were there before", (0, None)),
    "repetition_penalty": Distortion("lowers tokens that were there before", (1, None)),
    "logit_bias": Distortion("shifts logits", (None, {})),
    "bad_words": Distortion("forbids tokens", (None, [])),
    "allowed_token_ids": Distortion("forbids all other tokens", (None, [])),
    "min_tokens": Distortion("forbids the end of the response until then", (0, None)),
    "thinking_token_budget": Distortion("forces the end of the reasoning", (None, -1)),
    "use_beam_search": Distortion("searches for a likely response instead of sampling one", (False, None)),
    "length_penalty": Distortion("steers the beam search", (1, None)),
    "seed": Distortion("makes the rollouts of a group draw alike: each token is likely, their set is not"),
    "watermarking": Distortion("draws with a secret key instead of at random", (False, None)),
    "ignore_eos": Distortion("goes on past the end, where no other response is", (False, None)),
    "vllm_xargs": Distortion("tells extensions of the engine whatever they understand", (None, {})),
    "kv_transfer_params": Distortion("reads a cache that another version may have filled", (None, {})),
    "ec_transfer_params": Distortion("reads a cache that another version may have filled", (None, {})),
    "logits_processors": Distortion("changes logits, in engines older than this list", (None, [])),
}
"""Taken out of training requests; elsewhere a call that was sampled with one is not trainable."""

PROMPT_AS_IDS: Final = frozenset({"prompt_token_ids"})
"""Keys of `kv_transfer_params` that give the prompt: the engine reports it, and samples as ever."""


def distorts(name: str, value: object) -> bool:
    """Whether sampling with this value of a distorting parameter is not softmax(logits / T)."""
    if name == "kv_transfer_params" and isinstance(value, dict) and value.keys() == PROMPT_AS_IDS:
        return False
    return value not in DISTORTING[name].neutral


WITHHELD: Final[Mapping[str, str]] = {
    "include_reasoning": "false makes the engine leave out ids and logprobs",
    "echo": "repeats a message in the answer that was not sampled now",
    "prompt_logprobs": "makes the engine compute all logits of the prompt, past its cache",
    "logprob_token_ids": "spoils the top_logprobs of the calls in the same batch",
    "priority": "would let one rollout go before the others",
    "request_id": "two calls of one id are one call to the engine",
    "session_id": "names a conversation to the engine, beside the one that Hone knows",
    "mm_processor_kwargs": "is about what is not text",
    "media_io_kwargs": "is about what is not text",
    "mm_payload": "is for render, not for chat",
    "return_mm_kwargs": "is for render, not for chat",
    "return_token_offsets": "is for render, not for chat",
    "routed_experts_prompt_start": "is for engines that report their experts",
}
"""Taken out of training requests though they distort nothing -> why."""

OLD_GRAMMARS: Final = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar"})
"""Grammars of engines older than this list; this one reads them no more."""

TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
"""Types of the parts of a message that are nothing but tokens."""
