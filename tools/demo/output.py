"""The output folder of a run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.demo.config import DemoConfig
from tools.demo.supervisor import DemoError

_MARKER = ".ckptstore-demo"


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """The paths of a run's files."""

    root: Path

    @property
    def store(self) -> Path:
        """The store, left for its user to explore."""
        return self.root / "store"

    @property
    def reference(self) -> Path:
        """The records of the reference run."""
        return self.root / "reference"

    @property
    def config(self) -> Path:
        """The run's `DemoConfig`."""
        return self.root / "config.json"

    @property
    def log(self) -> Path:
        """The standard error of the workers."""
        return self.root / "workers.log"

    @property
    def plot(self) -> Path:
        """The picture."""
        return self.root / "loss.png"

    @property
    def summary(self) -> Path:
        """All numbers."""
        return self.root / "summary.json"

    def prepare(self, config: DemoConfig) -> None:
        """Make the folder, empty of an earlier run. Raises `DemoError` rather than delete other files."""
        if self.root.exists() and any(self.root.iterdir()) and not (self.root / _MARKER).exists():
            raise DemoError(f"{self.root} is not empty and was not made by the demo: name another folder with --out")
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / _MARKER).write_text("Made by python -m tools.demo, which removes its own earlier results here.\n")
        for folder in (self.store, self.reference):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.log, self.plot, self.summary):
            file.unlink(missing_ok=True)
        config.write(self.config)
        needed = (config.steps + config.kills + 4) * config.checkpoint_bytes
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise DemoError(f"{self.root} has {free / 1e9:.1f} GB free, the demo's store needs {needed / 1e9:.1f} GB")

    def store_bytes(self) -> int:
        """Bytes of all files in the store."""
        return sum(path.stat().st_size for path in self.store.rglob("*") if path.is_file())
