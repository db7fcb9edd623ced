"""Play one game of tic-tac-toe through any OpenAI-compatible API.

    MODEL_NAME=gpt-5-mini SCENARIO_FILE=scenario.json python agent.py

`OPENAI_BASE_URL` and `OPENAI_API_KEY` are read by the SDK; `TEMPERATURE` and `MAX_TOKENS` are
optional. Prints one line of JSON with the result as the agent saw it.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

from game import Game
from openai import Omit, OpenAI, omit
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)

SYSTEM_PROMPT = "You play X at tic-tac-toe. Free cells show their number. Call play until the end."
NO_CALL = "No call."
CALLS_MAX = 12
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "play",
            "description": "Put X on a free cell.",
            "parameters": {
                "type": "object",
                "properties": {"cell": {"type": "integer", "minimum": 0, "maximum": 8}},
                "required": ["cell"],
                "additionalProperties": False,
            },
        },
    }
]


def opening(game: Game) -> list[ChatCompletionMessageParam]:
    """The messages that open a game."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": game.view()},
    ]


def decode(arguments: str) -> object:
    """A tool call's arguments, or the text itself where it is not JSON."""
    try:
        decoded: object = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded


def answer(game: Game, message: ChatCompletionMessage) -> list[ChatCompletionMessageParam]:
    """Carry out a reply's tool calls. Returns the messages for the model; none ends the talk."""
    replies: list[ChatCompletionMessageParam] = []
    for call in message.tool_calls or []:
        if call.type == "function":
            result = game.call(call.function.name, decode(call.function.arguments))
        else:
            result = game.call("", None)
        replies.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not replies and not game.result:
        replies.append({"role": "user", "content": game.error(NO_CALL)})
    return replies


def replayed(message: ChatCompletionMessage) -> ChatCompletionMessageParam:
    """A reply as it goes back into the conversation: without what is empty, but with content."""
    fields = message.model_dump(include={"role", "content", "tool_calls"})
    filled = {key: value for key, value in fields.items() if value}
    return cast(ChatCompletionMessageParam, {"content": "", **filled})


def play_game(
    client: OpenAI,
    model: str,
    scenario: dict[str, Any],
    temperature: float | Omit = omit,
    max_tokens: int = 64,
) -> Game:
    """Play the scenario's game until the model answers without a call, or `CALLS_MAX`."""
    game = Game(seed=scenario["seed"], p=scenario["p"], x_starts=scenario["x_starts"])
    messages = opening(game)
    for _ in range(CALLS_MAX):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            temperature=temperature,
            max_tokens=max_tokens,
        )
        message = completion.choices[0].message
        replies = answer(game, message)
        if not replies:
            break
        messages += [replayed(message), *replies]
    return game


def main() -> None:
    scenario = json.loads(Path(os.environ["SCENARIO_FILE"]).read_text())
    temperature = os.environ.get("TEMPERATURE")
    game = play_game(
        OpenAI(),
        os.environ["MODEL_NAME"],
        scenario,
        float(temperature) if temperature else omit,
        int(os.environ.get("MAX_TOKENS", "64")),
    )
    print(json.dumps({"result": game.result or "unfinished", "errors": game.errors}))


if __name__ == "__main__":
    main()
