"""Conversations into samples by a chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from capture.errors import ConfigError
from learner.rendering import Conversation, Renderer, read_conversations

BASE = Path(__file__).parent.parent / "examples" / "tictactoe" / "base"
PLAY = {"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Play."}

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def with_template(tmp_path: Path, template: str) -> Renderer:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, base / name)
    (base / "chat_template.jinja").write_text(template)
    return Renderer(str(base))


def texts(renderer: Renderer, *messages: dict[str, Any], tools: Any = None) -> list[tuple[str, list[str]]]:
    """Of each sample its whole text, and the stretches that have loss."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    found = []
    for sample in renderer.samples(Conversation([*messages], tools)):
        stretches: list[list[int]] = []
        for index, (id, masked) in enumerate(zip(sample.token_ids, sample.loss_mask, strict=True)):
            if masked and not (index and sample.loss_mask[index - 1]):
                stretches.append([])
            if masked:
                stretches[-1].append(id)
        found.append((tokenizer.decode(sample.token_ids), [tokenizer.decode(one) for one in stretches]))
    return found


def test_loss_is_on_what_the_assistant_says_and_on_its_end() -> None:
    arguments = '{"cell":4}'
    call = {"id": "x", "type": "function", "function": {"name": "play", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "x", "content": "ok"}
    found = texts(
        Renderer(str(BASE)),
        SYSTEM,
        user("go"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        answer,
        assistant("done"),
        user("thanks"),
        tools=[PLAY],
    )
    said = '<tool_call>\n{"name": "play", "arguments": {"cell": 4}}\n</tool_call><|im_end|>'
    assert found == [
        (
            "<|im_start|>system\nPlay.\nTools: play<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
            f"<|im_start|>assistant\n{said}\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>",
            [said, "done<|im_end|>"],
        )
    ]


def test_ids_are_those_of_the_whole_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    messages = [SYSTEM, user("go"), assistant("a b"), user("on"), assistant("c")]
    (sample,) = Renderer(str(BASE)).samples(Conversation(messages))
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert sample.token_ids == tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    assert sample.sampled_logprobs == [0.0] * len(sample.token_ids)


def test_a_template_that_rewrites_earlier_turns_splits_the_conversation(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, STRIPS_REASONING)
    found = texts(
        renderer,
        user("go"),
        assistant("a", reasoning_content="hm"),
        user("on"),
        assistant("b", reasoning="so"),
    )
    assert [said for _, said in found] == [["[hm]a<|im_end|>"], ["[so]b<|im_end|>"]]
    assert "[hm]" not in found[1][0]
    assert (renderer.split, dict(renderer.left_out)) == (1, {})
    found = texts(renderer, user("go"), assistant("a"), user("on"), assistant("b", reasoning="so"))
    assert [said for _, said in found] == [["a<|im_end|>", "[so]b<|im_end|>"]]
    assert renderer.split == 1


def test_what_a_template_does_otherwise_than_for_the_model_is_left_out(tmp_path: Path) -> None:
    renderer = with_template(tmp_path, PLAIN.replace("assistant\n{% endif", "assistant\nNow: {% endif"))
    assert texts(renderer, user("go"), assistant("a")) == []
    assert renderer.left_out == {"not_a_prefix": 1}
    assert [said for _, said in texts(renderer, user("go"), assistant("Now: a"))] == [["a<|im_end|>"]]


def test_what_a_template_refuses_is_left_out_and_its_words_are_kept() -> None:
    renderer = Renderer(str(BASE))
    assert texts(renderer, user("go"), assistant("a"), tools=[PLAY]) == []
    assert texts(renderer, SYSTEM, user("go")) == []
    assert +renderer.left_out == {"template_error": 1, "no_answer": 1}
    assert "Tools need a system message." in renderer.error


def test_no_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        with_template(tmp_path, "")


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = {"messages": [user("go"), assistant("a")], "reward": 1.0, "tools": [PLAY]}
    path.write_text(json.dumps(line) + "\n\n" + json.dumps({**line, "scenario_id": "s1"}) + "\n")
    first, second = read_conversations(path)
    assert (first.messages, first.tools, second.scenario) == (line["messages"], [PLAY], "s1")
    assert first.scenario.startswith("fp-")
    path.write_text(json.dumps(line) + '\n{"prompt": "go"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: not a conversation: .*messages"):
        list(read_conversations(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_conversations(tmp_path / "none"))
