"""The state that an agent kept of a trainer that died: checks its hash, and restores it from memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckptstore.agent.protocol.frames import Message
from ckptstore.agent.protocol.message_fields import StateLayout, read, read_layout, whole_number
from ckptstore.agent.protocol.shared_memory import SharedMemory
from ckptstore.agent.protocol.state_hash import hash_of
from ckptstore.errors import AgentError, CorruptionError
from ckptstore.formats import dtypes
from ckptstore.formats.segment_files.segment import TensorEntry
from ckptstore.formats.sources import place_of
from ckptstore.formats.states.state import FlatState, Origin, TensorSource, unflatten
from ckptstore.frameworks import bridge
from ckptstore.host.buffers import Bytes, aligned
from ckptstore.host.threads import Workers, default_threads, run_all, workers
from ckptstore.restore.load import LoadOptions
from ckptstore.restore.load_targets import find_targets
from ckptstore.restore.selection import select_from
from ckptstore.write.capture.snapshot import HostTensor, copy_jobs

__all__ = ["Inherited", "read_inherited"]

_SHARED: Final = 1 << 20
_LINE: Final = 128


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """The newest state of a trainer that died.

    Attributes:
        step: optimizer steps done.
        durable: whether it is in the store, too.
        state: hash of the whole state (32 hex digits), as `CheckpointInfo.state`.
    """

    step: int
    durable: bool
    state: str
    _flat: FlatState
    _shared: SharedMemory

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(one.nbytes for one in self._flat.tensors.values())

    @property
    def is_whole(self) -> bool:
        """Whether every tensor is whole, none a shard."""
        return all(place_of(one) == (None, None) for one in self._flat.tensors.values())

    def check(self) -> None:
        """Raise `CorruptionError` if it differs from what the trainer handed over."""
        with workers(default_threads(), "agent-read") as readers:
            self._check(readers)

    def load(self, *, framework: Literal["torch", "numpy"] | None = None, into: Any = None, device: Any = None) -> Any:
        """Copy the state out of the agent's memory, bit for bit. Reads nothing from the store.

        Args:
            framework, into, device: as for `Store.load`.

        Raises:
            CorruptionError: it differs from what the trainer handed over. Nothing was copied.
            UsageError: as `Store.load`.
        """
        options = LoadOptions(framework=framework, into=into, device=device)
        flat = self._flat
        picked = select_from(flat.tree, None, f"step {self.step}")
        targets = None
        if into is not None:
            entries = {name: TensorEntry(name, one.dtype, tuple(one.shape), ()) for name, one in flat.tensors.items()}
            targets = find_targets(entries, picked, into, None)
        with workers(default_threads(), "agent-read") as readers:
            self._check(readers)
            resolve: Callable[[str, Origin], Any]
            if targets is not None:
                given = targets

                def write(name: str, source: TensorSource) -> Callable[[], None]:
                    return lambda: given.write(name, 0, _image(source))

                run_all(readers.pool, [write(name, one) for name, one in flat.tensors.items()])

                def resolve(name: str, _: Origin) -> Any:
                    return given.tensor(name)
            else:
                resolve = self._copied(readers, options)
        make = bridge.object_maker(to_torch=options.to_torch)
        return unflatten(flat.tree, resolve, bridge.tensors().revive if options.to_torch else None, make)

    def _check(self, readers: Workers) -> None:
        found = hash_of(self._flat, readers.pool)
        if found != self.state:
            raise CorruptionError(
                f"step {self.step} in the agent's memory is not what was handed over (hash {found}, not {self.state})"
            )

    def _copied(self, readers: Workers, options: LoadOptions) -> Callable[[str, Origin], Any]:
        """Copies in new memory: the agent will overwrite its own."""
        data = _memories(self._flat)
        run_all(readers.pool, copy_jobs([(one, data[name]) for name, one in self._flat.tensors.items()]))

        def resolve(name: str, origin: Origin) -> Any:
            one = self._flat.tensors[name]
            if origin == "torch" and options.to_torch:
                made = bridge.tensors().from_buffer(one.dtype, one.shape, data[name])
                return made if options.device is None else made.to(options.device)
            return data[name].view(dtypes.get(one.dtype).numpy).reshape(one.shape)

        return resolve


def _memories(flat: FlatState) -> dict[str, Bytes]:
    """New memory for each tensor. Small tensors share a block: the number of mappings of a process is limited."""
    small = {name: -(-one.nbytes // _LINE) * _LINE for name, one in flat.tensors.items() if one.nbytes < _SHARED}
    block, at = aligned(sum(small.values())), 0
    found: dict[str, Bytes] = {}
    for name, one in flat.tensors.items():
        if name in small:
            found[name] = block[at : at + one.nbytes]
            at += small[name]
        else:
            found[name] = aligned(one.nbytes)
    return found


def _image(source: TensorSource) -> Bytes:
    image = source.view()
    assert image is not None  # shared memory
    return image


def read_inherited(message: Message) -> Inherited:
    """Read an agent's answer to ``newest``.

    Raises:
        AgentError: the answer is invalid.
    """
    body, descriptor = message.body, message.descriptor
    if descriptor is None:
        raise AgentError("the agent sent no memory with its newest state")
    message.descriptor = None
    shared = SharedMemory(descriptor, read("newest", body, lambda form: whole_number(form["nbytes"], 1 << 46)))
    shared.close()

    def made(form: dict[str, Any]) -> Inherited:
        layout: StateLayout = read_layout(form["tensors"])
        tensors: dict[str, TensorSource] = {}
        for one, start in zip(layout.tensors, form["offsets"], strict=True):
            end = whole_number(start, 1 << 46) + one.nbytes
            if end > len(shared.memory):
                raise AgentError(f"tensor {one.name!r:.80} ends at byte {end} of {len(shared.memory)}")
            tensors[one.name] = HostTensor(one, shared.memory[start:end])  # type: ignore[arg-type]
        flat = FlatState(form["tree"], tensors)
        return Inherited(whole_number(form["step"]), form["durable"] is True, str(form["state"]), flat, shared)

    return read("newest", body, made)
