"""The division of a state into layers, and a save whose layers are being copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptstore.formats.states.state import FlatState, TensorSource
from ckptstore.frameworks.torch_tensors import TorchSource
from ckptstore.training.layerwise.layer_sources import LayerSource
from ckptstore.write.capture.layerwise_save import Awaited, LayeredSave

__all__ = ["LayerDivision", "StartedSave"]


@dataclass(slots=True)
class LayerDivision:
    """How a state is divided into layers, known before the next state exists.

    Attributes:
        flat: its tensors; those in no layer are placeholders without memory.
        members: the tensors of each layer, by name.
    """

    flat: FlatState
    members: dict[str, dict[str, TorchSource]]

    @classmethod
    def of(cls, flat: FlatState, members: dict[str, dict[str, TorchSource]]) -> LayerDivision:
        """The division of a state, from the tensors of each layer."""
        layered = {name for tensors in members.values() for name in tensors}
        tensors: dict[str, TensorSource] = {
            name: one if name in layered else Awaited(one) for name, one in flat.tensors.items()
        }
        return cls(FlatState(flat.tree, tensors), members)

    def names(self) -> dict[str, tuple[str, ...]]:
        """The tensors of each layer that has any."""
        return {layer: tuple(tensors) for layer, tensors in self.members.items() if tensors}

    def same(self, flat: FlatState, members: Mapping[str, Mapping[str, TorchSource]]) -> bool:
        """Whether a state has the same tensors, with equal dtypes and shapes, in the same layers."""
        return [(name, one.dtype, tuple(one.shape)) for name, one in self.flat.tensors.items()] == [
            (name, one.dtype, tuple(one.shape)) for name, one in flat.tensors.items()
        ] and all(list(self.members[layer]) == list(tensors) for layer, tensors in members.items())


@dataclass(slots=True)
class StartedSave:
    """A save whose layers are copied.

    Attributes:
        save: the engine's save.
        missing: for each layer that waits for optimizers, which have not stepped yet.
        staged: for each layer whose copy has started, its source, which has the gate.
        stale: layers may have changed since.
    """

    save: LayeredSave
    form: LayerDivision
    missing: dict[str, set[int]]
    staged: dict[str, LayerSource] = field(default_factory=dict)
    stale: bool = False

    def abandon(self) -> None:
        """Give the save up, and free what the devices have copied for it.

        Returns when the host reads no layer any more, and later work of devices waits for their copies.
        """
        self.save.abandon()
        for one in self.staged.values():
            # Prevents: an optimizer that changes a layer while a device copies it: no hook knows of it now.
            one.gate()
            # Prevents: a device that holds these copies until Python collects cycles: their reads were cancelled.
            one.free()
