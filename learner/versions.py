"""Recent versions of the policy as frozen adapters, as the engines hold them."""

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from capture.types import Version
from learner import files
from learner.model import Tensors, rounded
from learner.publish import WEIGHTS


class Versions:
    """Adapters by version, at most `kept` in memory; older ones are read from their directories."""

    def __init__(self, versions: list[Version], kept: int, dtype: str) -> None:
        self._versions = {version.version: version for version in versions}
        self._kept = kept
        self._dtype = dtype
        self._adapters: OrderedDict[int, Tensors] = OrderedDict()

    def read(self, versions: list[Version]) -> None:
        """Learn of these versions, as the store has them now."""
        self._versions.update({version.version: version for version in versions})

    def add(self, version: Version, adapter: Tensors) -> None:
        """Remember a version and what it serves."""
        self._versions[version.version] = version
        self._keep(version.version, rounded(adapter, self._dtype))

    def steps(self, versions: Collection[int]) -> set[int]:
        """The steps that made these versions, as far as they are known."""
        return {self._versions[version].step for version in versions if version in self._versions}

    def distance(self, version: int) -> int:
        """Lineage versions between version 0 and this one."""
        return self._versions[version].distance

    def origin(self, version: int) -> Path | None:
        """The directory of the version, or of its nearest ancestor that was published; None: the base."""
        found = self._versions[version]
        while found.path is None and found.parent is not None:
            found = self._versions[found.parent]
        return None if found.path is None else Path(found.path)

    def adapter(self, version: int) -> Tensors | None:
        """The frozen adapter; None: version 0 that is the bare base. `OSError` if its directory is gone."""
        if version not in self._adapters:
            path = self._versions[version].path
            if path is None and version == 0:
                return None
            if path is None:
                raise FileNotFoundError(f"version {version} was never published")
            self._keep(version, files.read_tensors(Path(path) / WEIGHTS))
        self._adapters.move_to_end(version)
        return self._adapters[version]

    def _keep(self, version: int, adapter: Tensors) -> None:
        self._adapters[version] = adapter
        self._adapters.move_to_end(version)
        while len(self._adapters) > self._kept:
            self._adapters.popitem(last=False)
