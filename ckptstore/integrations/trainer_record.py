"""What a checkpoint of a Hugging Face Trainer holds besides the model, the optimizer, the schedule and the generators.

::

    {"files": {name: bytes}, "state": bytes, "history": [bytes, ...]}

``files`` are the configuration, the tokenizer and ``training_args.bin``: they do not change, so a delta or a step diff
does not store them again. ``state`` is the `TrainerState` as JSON without its ``log_history``, ``history`` is that, one
JSON line for each entry. All are uint8 arrays whose lengths change rarely: `state` is padded with spaces, and the
history is cut into parts of `_PART` bytes, of which only the last one changes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

__all__ = ["TrainerRecord", "files_of"]

_PART: Final = 16 << 10
"""Bytes of one part of the history."""
_STATE_PART: Final = 4 << 10
"""The length of ``state`` is a multiple of this."""


class TrainerRecord:
    """The record, as an object for ``Checkpointer(extra=...)``.

    Attributes:
        per_rank: each rank stores its own: the log has durations, which differ.
    """

    per_rank: Final = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """
        Args:
            files: name -> content.
        """
        self._files = {name: np.frombuffer(data, np.uint8) for name, data in files.items()}
        self._state = _padded(b"{}", _STATE_PART)
        self._history: list[Any] = []
        self._noted = 0  # entries of the log in the history
        self._tail = b""  # the last part, without its padding

    def note(self, state: Any, callbacks: Sequence[Any]) -> None:
        """Take the Trainer's state as it is now.

        Args:
            state: the `TrainerState`.
            callbacks: those whose own states are stored in it (`ExportableState`).
        """
        history = state.log_history
        fields = {
            field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "log_history"
        }
        # A folder of an earlier process is gone when this is read.
        fields["best_model_checkpoint"] = None
        own: dict[str, Any] = {}
        for one in callbacks:
            own.setdefault(type(one).__name__, []).append(one.state())
        named = {name: found[0] if len(found) == 1 else found for name, found in own.items()}
        fields["stateful_callbacks"] = {**(fields["stateful_callbacks"] or {}), **named}
        self._state = _padded(json.dumps(fields).encode(), _STATE_PART)
        if len(history) < self._noted:  # another training
            self._history, self._noted, self._tail = [], 0, b""
        if len(history) > self._noted:
            self._append(b"".join(json.dumps(one).encode() + b"\n" for one in history[self._noted :]))
            self._noted = len(history)

    def state_dict(self) -> dict[str, Any]:
        """The record."""
        return {"files": dict(self._files), "state": self._state, "history": list(self._history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the Trainer reads its state from the folder that the callback makes."""

    def _append(self, lines: bytes) -> None:
        data = self._tail + lines
        whole = self._history[:-1] if self._tail else self._history
        parts = [data[begin : begin + _PART] for begin in range(0, len(data), _PART)]
        self._history = [*whole, *(_padded(one, _PART) for one in parts)]
        self._tail = parts[-1] if len(parts[-1]) < _PART else b""


def _padded(data: bytes, unit: int) -> Any:
    return np.frombuffer(data + b" " * (-len(data) % unit), np.uint8)


def files_of(model: torch.nn.Module, processing_class: Any, arguments: Any) -> dict[str, bytes]:
    """The files that belong to a model: name -> content.

    Args:
        model: its configuration is written as `save_pretrained` writes it. A model without one has none.
        processing_class: the tokenizer or processor, or None.
        arguments: the `TrainingArguments`, stored as ``torch.save`` writes them and never read back.
    """
    with tempfile.TemporaryDirectory(prefix="ckptstore-files-") as folder:
        adapted: Any = model
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            adapters = list(adapted.peft_config.values())
            if len(adapters) == 1:  # as `save_pretrained` of PEFT writes it
                saved = copy.deepcopy(adapters[0])
                saved.inference_mode = True
                saved.save_pretrained(folder)
            model = adapted.get_base_model()
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            config.architectures = [type(model).__name__]
            config.dtype = str(getattr(model, "dtype", "")).removeprefix("torch.") or None
            config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        torch.save(arguments, Path(folder, "training_args.bin"))
        # A tokenizer may write folders (templates); the Trainer's own checkpoints have them, too.
        return {one.name: one.read_bytes() for one in sorted(Path(folder).iterdir()) if one.is_file()}
