"""The example's agent, which also notes each call whose answer it has read: what Hone must not lose."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "tictactoe"))


class Completions:
    """`client.chat.completions` that keeps the ids of answered calls."""

    def __init__(self, client: OpenAI, log: Path) -> None:
        self._client = client
        self._log = log

    def create(self, **request: Any) -> Any:
        raw = self._client.chat.completions.with_raw_response.create(**request)
        completion = raw.parse()
        with self._log.open("a") as file:
            file.write(raw.headers["x-hone-call-id"] + "\n")
        return completion


class Client:
    """As much of an OpenAI client as the agent uses."""

    def __init__(self, client: OpenAI, log: Path) -> None:
        self.chat = self
        self.completions = Completions(client, log)


def main() -> None:
    from agent import play_game

    scenario = json.loads(Path(os.environ["SCENARIO_FILE"]).read_text())
    client: Any = Client(OpenAI(), Path(os.environ["ACKNOWLEDGED"]))
    game = play_game(client, os.environ["MODEL_NAME"], scenario)
    print(json.dumps({"result": game.result}))


if __name__ == "__main__":
    main()
