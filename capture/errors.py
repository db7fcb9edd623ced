"""The errors that cross rooms.

::

    HoneError
    ├── ConfigError          a setting is wrong; the message names it
    ├── StoreError           the store could not do what was asked
    │   ├── StoreBusy        it may work later; nothing was written
    │   ├── Fenced           a newer holder of the lease exists; stop
    │   └── Corrupt          stored bytes do not read back
    ├── NotFound             no such rollout, call, group or version
    ├── Conflict             the thing is past the state this needs
    │   └── RewardFrozen     its batch was taken; carries the batch
    ├── UpstreamError        an upstream broke: connect, timeout, mid-stream, garbage
    └── AdapterError         an adapter failed to load or to verify
"""


class HoneError(Exception):
    """Root of everything that Hone raises on purpose."""


class ConfigError(HoneError):
    """A setting is wrong; the message names the setting to change."""


class StoreError(HoneError):
    """The store could not do what was asked."""


class StoreBusy(StoreError):
    """Another writer held the store too long; nothing was written."""


class Fenced(StoreError):
    """A newer holder of the lease exists: this process must stop writing."""


class Corrupt(StoreError):
    """Stored bytes do not read back."""


class NotFound(HoneError):
    """No such rollout, call, group or version."""


class Conflict(HoneError):
    """The thing is past the state that the request needs."""


class RewardFrozen(Conflict):
    """The rollout's batch was taken: its reward can no longer change."""

    def __init__(self, rollout_id: str, batch_id: str) -> None:
        super().__init__(f"rollout {rollout_id}: its reward was frozen by batch {batch_id}")
        self.batch_id = batch_id


class UpstreamError(HoneError):
    """An upstream broke: connection refused, timeout, cut mid-stream, or garbage."""


class AdapterError(HoneError):
    """An adapter failed to load, or the engine did not prove that it serves it."""
