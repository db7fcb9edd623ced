"""Where the wall time of a batch goes."""

import time


class Clock:
    """Seconds by what they went to. Commit and publish are those of the batch before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"commit_s": 0.0, "publish_s": 0.0}
        self._last = time.monotonic()

    def lap(self, name: str) -> float:
        """The time since the last lap goes to `name`."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now
        return self.seconds[name]
