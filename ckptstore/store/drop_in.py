"""`ckptstore.save` and `ckptstore.load`: what scripts do with ``torch.save`` and ``torch.load(weights_only=True)``."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ckptstore.errors import CkptError, FencedError, StoreNotFoundError, UsageError
from ckptstore.host.caller_warnings import warn
from ckptstore.store.open_store import open as open_store

if TYPE_CHECKING:
    from ckptstore.log.checkpoint_info import CheckpointInfo
    from ckptstore.store.store import Store
    from ckptstore.write.writer import Writer

__all__ = ["load", "save"]

KEPT: Final = 2
"""How many checkpoints stay in a store that `save` creates."""
_TORCH: Final = (".pt", ".pth", ".bin")
_FILES: Final = (*_TORCH, ".safetensors")
_ONE_PROCESS: Final = (
    "save from one process (with torchrun: `if rank == 0`), or open a writer with group=, with which the ranks save "
    "together (docs/ranks.md)"
)
_UNFREED: Final = 64 << 20
"""Bytes saved since space was last freed, from which on the next save frees it again; and ..."""
_SAVES: Final = 16
"""... how many saves: for small states a look at the log would take longer than the save."""
_opening = threading.Lock()
_saved: Final[dict[str, tuple[int, int]]] = {}
"""Saves, and their bytes, since space was last freed in a store."""


def save(
    obj: Any,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    replace: bool = False,
    keep: int | Sequence[str] | None = None,
    tags: str | Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointInfo | None:
    """Save a state durably: as the next checkpoint of the store at `path`, which is created if there is none.

    Nothing is overwritten: after a crash at any moment the last state that was saved is there. All calls of a process
    share one writer (`Store.writer` with ``reuse``). A path that ends in ``.pt``, ``.pth`` or ``.bin`` becomes a file
    that ``torch.load(weights_only=True)`` reads, and ``.safetensors`` a safetensors file. Such a file replaces an
    existing one, complete and durable or not at all.

    Args:
        obj: tensors, numbers, texts, lists, dicts of these ..., such as a ``state_dict()``; no objects with code.
        path: a folder or URL of a store, or a local file.
        step: the number of the checkpoint; above the newest one. None: the next.
        replace: `step`, which has to be given, may be that of the newest checkpoint, which is then replaced as
            `Writer.save` does. A file is always replaced.
        keep: how many of the newest checkpoints stay, or retention rules as in `Store.writer`. Those with a tag always
            stay. None: two in a store that this call creates; another store keeps its rules.
        tags, metadata: as for `Writer.save`.
        storage_options: as for `open`.

    Returns:
        the checkpoint; None: a file was written.

    Raises:
        UnsupportedStateError: something in `obj` cannot be stored: a module, an optimizer, a function ... The error
            names its key path. Nothing was written.
        UsageError: `path` is an open file, or holds something else; an option is not for a file; or another process
            saves to this store.
        StepOrderError: `step` is not above the newest one (with `replace`: is below it).
        ReadOnlyError, StorageError: the medium cannot be written. What was saved before is there.
        FencedError: another process has begun to save to this store. The next call takes over again.

    Example:
        >>> save({"weight": 1.5}, "memory://drop-in").ref
        '1@1'
        >>> load("memory://drop-in")
        {'weight': 1.5}
    """
    file = _file_at(path, "save(obj, 'model.pt')")
    if file is not None and _ends_like_a_file(file) and not file.is_dir():
        _save_to_file(obj, file, step=step, keep=keep, tags=tags or None, metadata=metadata)
        return None
    rules = _rules(keep)
    store = _opened(path, storage_options)
    try:
        info = _writer(store, rules).save(obj, step, tags=tags, metadata=metadata, replace=replace)
    except FencedError as error:
        error.add_note(f"another process saves to {store.url}: {_ONE_PROCESS}")
        raise
    _free_space(store, info.stored)
    return info


def load(
    path: str | os.PathLike[str],
    ref: str | int = "latest",
    *,
    map_location: Any = None,
    framework: Literal["torch", "numpy"] | None = None,
    mmap: bool = False,
    weights_only: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load what `save` saved: the newest checkpoint of a store, or a torch or safetensors file. Verifies checksums.

    Args:
        path: a folder or URL of a store; or a file, whose format is found in its contents.
        ref: which checkpoint of a store, as for `Store.load`.
        map_location: the device of the tensors. None: the CPU; for a torch file the device that it names.
        framework: ``torch`` or ``numpy``, as for `Store.load`; a torch file needs ``torch``.
        mmap: map the file instead of reading it, as `Store.load` and ``torch.load`` do; not for safetensors.
        weights_only: pickled code is never run, so this must be True.
        storage_options: as for `open`.

    Raises:
        StoreNotFoundError: there is neither a store nor a file (also a `FileNotFoundError`).
        CheckpointNotFoundError: the store has no such checkpoint.
        UnsupportedStateError: loading the file would run pickled code.
        FormatError: the file is not a torch or safetensors file, or is damaged.
        CorruptionError: a checksum differs. Nothing is returned.
        UsageError: an option is invalid, or `path` is an open file.
        StorageError: the medium failed.
    """
    if weights_only is not True:
        raise UsageError("weights_only: pickled code is never run here; for a file that you trust call torch.load")
    file = _file_at(path, "load('model.pt')")
    if file is not None and _is_file(file):
        if ref != "latest":
            raise UsageError(f"ref: {ref!r}; {path} is a file, which has one state")
        from ckptstore.exchange.plain_files import load_file

        return load_file(file, map_location=map_location, framework=framework, mmap=mmap)
    if map_location is not None and not isinstance(map_location, str | int) and not hasattr(map_location, "type"):
        raise UsageError(f"map_location: {map_location!r:.80}; for a store it is a device, such as 'cpu' or 'cuda:1'")
    try:
        with open_store(path, create=False, storage_options=storage_options) as store:
            return store.load(ref, framework=framework, device=map_location, mmap=mmap)
    except StoreNotFoundError as error:
        if file is not None and file.is_dir():
            names = sorted(one.name for one in file.iterdir() if _ends_like_a_file(one))
            some = f"; load one of its files: {', '.join(names[:3])}" if names else ""
            error.add_note(f"{path} is a folder, but not a store{some}")
        raise


def _save_to_file(obj: Any, path: Path, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name}: a file such as {path} has none; without its ending, {path} is a store")
    from ckptstore.exchange.plain_files import save_file

    save_file(obj, path)


def _opened(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Store:
    try:
        return open_store(path, storage_options=storage_options)
    except StoreNotFoundError as error:
        if error.instead == "file":
            error.add_note(f"give a folder; a name that ends in {', '.join(_FILES)} makes a file")
        raise


def _file_at(path: Any, example: str) -> Path | None:
    """The local path; None: it is the URL of a store. Raises `UsageError` for an open file."""
    if hasattr(path, "read") or hasattr(path, "write"):
        name = getattr(path, "name", None)
        place = f" ({name!r})" if isinstance(name, str) else ""
        raise UsageError(
            f"path: an open file{place}; give the path itself, as in ckptstore.{example}: it is replaced only when the "
            "new contents are durable, which an open file cannot be"
        )
    try:
        text = os.fspath(path)
    except TypeError:
        raise UsageError(f"path: {path!r:.80}; a path or URL is needed") from None
    if not isinstance(text, str):
        raise UsageError(f"path: {text!r:.80}; a text is needed, not bytes")
    if "://" not in text:
        return Path(text).expanduser()
    if text.lower().endswith(_FILES):
        raise UsageError(f"{text}: files are written to and read from local paths; a store may be at a URL")
    return None


def _ends_like_a_file(path: Path) -> bool:
    return path.suffix.lower() in _FILES


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # opening a store reports it
        return False


def _rules(keep: int | Sequence[str] | None) -> tuple[str, ...] | None:
    """The rules of retention; None: the store's own."""
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, int | list | tuple):
        raise UsageError(f"keep: {keep!r:.80}; the number of checkpoints that stay, or a list of rules as ['last:2']")
    if not isinstance(keep, int):
        return tuple(keep)
    if keep < 1:
        raise UsageError(f"keep: {keep}; at least 1: the newest checkpoint always stays (keep=[] keeps all)")
    return (f"last:{keep}",)


def _writer(store: Store, rules: tuple[str, ...] | None) -> Writer:
    """The writer of this process for a store, with these rules of retention."""
    from ckptstore.store.shared_writers import close_shared, found_writer

    address = store.backend.address or store.url
    with _opening:  # two threads must not both find that there is none
        writer = found_writer(address, type(store)(store.backend.reopened()).journal)
        if writer is not None:
            if rules is None or set(rules) == set(store.rules()):
                return writer
            close_shared(address)
        try:
            catalog = store.view().catalog
        except StoreNotFoundError:
            return store.writer(reuse=True, keep=(f"last:{KEPT}",) if rules is None else rules)
        from ckptstore.log.change_committer import known_writer

        state, _, pid = known_writer(catalog)
        if state == "alive" and (pid != os.getpid() or _is_open(store.url, catalog.term)):
            raise _busy(store.url, pid)
        return store.writer(reuse=True, keep=rules)


def _is_open(url: str, term: int) -> bool:
    """Whether this process has a writer of a term open."""
    from ckptstore.backends.store_names import canonical
    from ckptstore.host.interpreter_exit import watched

    place = canonical(url)
    return any(canonical(one.url) == place and getattr(one, "term", None) == term for one in watched())


def _busy(url: str, pid: int | None) -> UsageError:
    if pid == os.getpid():
        return UsageError(f"{url}: this process has a writer of this store open: save with it, or close it first")
    error = UsageError(f"{url}: process {pid} of this host saves to this store: {_ONE_PROCESS}")
    error.add_note("to take over from that process: ckptstore.open(path).writer(reuse=True), then save again")
    return error


def _free_space(store: Store, stored: int) -> None:
    """Delete what the rules of retention do not keep, at the first save of a process and now and then."""
    place = store.backend.address or store.url
    saves, nbytes = _saved.get(place, (_SAVES, 0))
    if saves + 1 < _SAVES and nbytes + stored < _UNFREED:
        _saved[place] = saves + 1, nbytes + stored
        return
    _saved[place] = 0, 0
    try:
        if store.view().catalog.dropped:
            store.gc()
    except CkptError as error:  # the state is saved
        warn(f"{store.url}: checkpoints that are no longer kept could not be deleted: {error}")


def _forked() -> None:
    """Prevents: a fork that waits for a lock which a thread of its parent holds."""
    global _opening
    _opening = threading.Lock()
    _saved.clear()


os.register_at_fork(after_in_child=_forked)
