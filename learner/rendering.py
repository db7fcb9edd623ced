"""Conversations into samples by the base model's chat template: loss on what the assistant says.

A turn is rendered as an engine meets it: everything before it is the prompt, with the template's
beginning of an answer, and the answer ends with the model's end-of-turn token. Turns whose prompts go on
from one another share a sample; where a template rewrites what was said (it takes reasoning out of earlier
turns), the next turn begins a sample of its own, as it does in the call graph.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig

from capture.conversation import conversational
from capture.errors import ConfigError
from capture.fingerprint import fingerprint
from capture.types import Sample
from learner.model import base_path

LEFT_OUT: Final[dict[str, str]] = {
    "template_error": "the chat template refuses the conversation",
    "not_a_prefix": "the chat template writes an answer in another way than it begins one for the model",
    "no_answer": "the assistant says nothing",
}
"""Why conversations (not_a_prefix: answers) are left out -> what that means."""

Message = dict[str, Any]


class Conversation(msgspec.Struct, frozen=True):
    """A line of a file in the conversational format; other fields are not looked at."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    scenario_id: str | None = None

    @property
    def scenario(self) -> str:
        """Its scenario; that of lines which name none is a fingerprint of how they begin."""
        return self.scenario_id or fingerprint(self.messages, self.tools or [])


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Line by line. `ConfigError` naming the line that is not a conversation."""
    decoder = msgspec.json.Decoder(Conversation)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield decoder.decode(line)
                    except msgspec.DecodeError as error:
                        raise ConfigError(f"{path}:{number}: not a conversation: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class Renderer:
    """The base model's tokenizer and chat template. Counts what it could not render."""

    def __init__(self, base_model: str) -> None:
        base = base_path(base_model)
        self._tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"policy.base_model: {base} has no chat template to render conversations with")
        self._ends = _end_ids(base, self._tokenizer.eos_token_id)
        self.left_out = Counter[str]()
        self.split = 0  # conversations that became several samples
        self.error = ""  # the first that the template raised

    def samples(self, conversation: Conversation) -> list[Sample]:
        """One or more; none where nothing can be learned from it."""
        messages = [conversational(message) for message in conversation.messages]
        drafts: list[_Draft] = []
        refused = self.left_out["not_a_prefix"]
        try:
            for index, message in enumerate(messages):
                if message["role"] == "assistant":
                    self._add_turn(drafts, messages[: index + 1], conversation.tools or None)
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
        ) as error:  # the template's own
            self.left_out["template_error"] += 1
            self.error = self.error or f"{type(error).__name__}: {error}"
            return []
        if not drafts and self.left_out["not_a_prefix"] == refused:
            self.left_out["no_answer"] += 1
        self.split += len(drafts) > 1
        return [draft.sample() for draft in drafts]

    def _add_turn(
        self, drafts: list["_Draft"], messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> None:
        """Put the last message into the last draft if its prompt goes on from that, else into a new one."""
        prompt = self._ids(messages[:-1], tools, begin_answer=True)
        whole = self._ids(messages, tools, begin_answer=False)
        if not prompt or whole[: len(prompt)] != prompt:
            self.left_out["not_a_prefix"] += 1
            return
        said = whole[: self._end(whole, len(prompt))]
        if len(said) == len(prompt):
            return
        if not drafts or prompt[: len(drafts[-1].ids)] != drafts[-1].ids:
            drafts.append(_Draft())
        drafts[-1].extend(prompt, said)

    def _ids(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, begin_answer: bool
    ) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=begin_answer, tokenize=False
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end(self, ids: Sequence[int], start: int) -> int:
        """Past the answer's end-of-turn token, which is the last thing that the model says."""
        for index in range(len(ids) - 1, start - 1, -1):
            if ids[index] in self._ends:
                return index + 1
        return len(ids)


class _Draft:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []

    def extend(self, prompt: Sequence[int], said: Sequence[int]) -> None:
        """`prompt` goes on from what is here, `said` from the prompt."""
        self.mask += [False] * (len(prompt) - len(self.ids)) + [True] * (len(said) - len(prompt))
        self.ids = list(said)

    def sample(self) -> Sample:
        return Sample(
            rollout_id="",
            token_ids=self.ids,
            loss_mask=self.mask,
            sampled_logprobs=[0.0] * len(self.ids),
            spans=[],
        )


def _end_ids(base: Path, eos: int | None) -> set[int]:
    """Ids with which the model ends its turn: the tokenizer's and those at which engines stop."""
    ends = {eos} if eos is not None else set()
    if (base / "generation_config.json").is_file():
        stops = GenerationConfig.from_pretrained(base).eos_token_id
        ends |= {stops} if isinstance(stops, int) else set(stops or ())
    return ends
