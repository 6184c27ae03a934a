"""What layer-wise snapshots cost: how long training waited at each gate, and how much copying it did not wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ckptstore.write.capture.layer_copies import LayerCopy

__all__ = ["Gate", "GateLog", "LayerwiseReport"]


@dataclass(frozen=True, slots=True)
class Gate:
    """How long the updates of one layer waited for its copies.

    Attributes:
        layer: its name.
        nbytes: of its tensors in a checkpoint.
        passed: how often an optimizer passed the gate while a snapshot needed the layer.
        waited: how often training had to wait there.
        seconds: total seconds of waiting.
        longest: seconds of the longest wait.
    """

    layer: str
    nbytes: int = 0
    passed: int = 0
    waited: int = 0
    seconds: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerwiseReport:
    """What layer-wise snapshots have cost training so far, in seconds of the host's clock.

    In `device` mode on a GPU the gate is a wait of the device's stream, which the host does not see.

    Attributes:
        mode: where layers are copied to first.
        gates: one for each layer, in the order of the model.
        saves: how many saves `save` passed to the writer.
        call_seconds: spent in `begin` and `save`, including the wait for a free snapshot.
        immediate_bytes: total bytes that `save` itself copied, because no optimizer owns them.
        copying_seconds: sum over all saves of the time from the first layer's start to the last layer's end.
        copied_again: layers copied twice for one save, because they were updated again or are not the expected ones.
        restarts: saves whose early copies were discarded and made again in `save`.
        restarted: the reason of the last restart.
        refused: copies on the device for which it had no memory; they were made directly to the host.
    """

    mode: str
    gates: tuple[Gate, ...]
    saves: int
    call_seconds: float
    immediate_bytes: int
    copying_seconds: float
    copied_again: int
    restarts: int
    restarted: str
    refused: int

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting at all gates."""
        return sum(gate.seconds for gate in self.gates)

    @property
    def overlapped_seconds(self) -> float:
        """Seconds of copying during which training did not wait at a gate."""
        return max(0.0, self.copying_seconds - self.waited_seconds)


class GateLog:
    """Counts the numbers of a `LayerwiseReport`; any thread may call it.

    Attributes:
        saves, call_seconds, immediate_bytes, copied_again, restarts, restarted, refused: as there.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self._gates = {layer: Gate(layer) for layer in layers}
        self._copying = 0.0
        self._lock = threading.Lock()
        self.saves = 0
        self.call_seconds = 0.0
        self.immediate_bytes = 0
        self.copied_again = 0
        self.restarts = 0
        self.restarted = ""
        self.refused = 0

    def passed(self, layer: str, seconds: float) -> None:
        """A gate was passed after so many seconds."""
        with self._lock:
            old = self._gates[layer]
            self._gates[layer] = Gate(
                layer,
                old.nbytes,
                old.passed + 1,
                old.waited + (seconds > 0),
                old.seconds + seconds,
                max(old.longest, seconds),
            )

    def copied(self, copies: Iterable[LayerCopy]) -> None:
        """All layers of a save are copied."""
        done = [(copy, copy.ended) for copy in copies if copy.ended is not None]
        if not done:
            return
        with self._lock:
            self._copying += max(ended for _, ended in done) - min(copy.began for copy, _ in done)
            for copy, _ in done:
                old = self._gates[copy.layer]
                self._gates[copy.layer] = Gate(
                    copy.layer, copy.nbytes, old.passed, old.waited, old.seconds, old.longest
                )

    def report(self, mode: str) -> LayerwiseReport:
        """What is known now."""
        with self._lock:
            return LayerwiseReport(
                mode,
                tuple(self._gates.values()),
                self.saves,
                self.call_seconds,
                self.immediate_bytes,
                self._copying,
                self.copied_again,
                self.restarts,
                self.restarted,
                self.refused,
            )
