"""Suggests what to do about an error, as a command ready to paste.

Nothing here may fail: the caller is already handling an error.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ckptstore import errors
from ckptstore.cli.ref_syntax import like_a_ref

__all__ = ["TYPED", "hint_for", "near_names", "note_damage"]

TYPED: ContextVar[Mapping[str, Any] | None] = ContextVar("TYPED", default=None)
"""The arguments and options of the running command."""

_REFS = ("ref", "refs", "ref_a", "ref_b", "rest")
"""Arguments of commands that take a STORE and REFs. If the user swapped the order, STORE is in one of these."""
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_HINTS: tuple[tuple[type[Exception], str], ...] = (
    (errors.CheckpointNotFoundError, "`ckpt log {store}` lists the checkpoints"),
    (errors.TensorNotFoundError, "`ckpt inspect {store} {ref} --tensors` lists the tensors"),
    (errors.CorruptionError, "`ckpt verify {store}` names what is damaged and what is still restorable"),
    (errors.KeyNotFoundError, "`ckpt verify {store}` names what is damaged and what is still restorable"),
    (errors.IncompatibleFormatError, "a newer version of ckptstore wrote this; upgrade"),
    (errors.CommitUnknownError, "`ckpt log {store}` shows whether the checkpoint is there"),
    (errors.StoreReplacedError, "the store may have been moved: look for it in its new place"),
    (errors.RequestRefusedError, "nothing was changed; run the same command to ask again"),
    (errors.RequestTimeoutError, "it is safe to ask again; if no run is writing: --take-over"),
    (errors.FencedError, "another writer took over the store; `ckpt log {store}` shows its term"),
)


def hint_for(error: BaseException) -> str | None:
    """Return the hint for an error: the error's own note, or the hint of its class."""
    near = getattr(error, "nearest", None)
    # Its note says which Python call to make, which does not help in a shell. The command is named below instead.
    notes = getattr(error, "__notes__", ()) if near is None else ()
    if notes:
        return str(notes[-1])
    typed = TYPED.get() or {}
    store = typed.get("store")
    if isinstance(error, errors.StoreNotFoundError):
        given = [typed.get("store"), typed.get("other"), typed.get("folder")]
        return _store_first(store, typed) or _no_store(error, given)
    if type(error) is errors.NotFoundError and isinstance(typed.get("folder"), str):
        folders = [near for near in near_names(typed["folder"]) if Path(near).is_dir()]
        return f"did you mean {shlex.quote(folders[0])}?" if folders else None
    if isinstance(error, errors.UsageError) and error.no_rules and isinstance(store, str):
        name = shlex.quote(store)
        return f"`ckpt prune {name} --keep last:100` prunes once; `ckpt keep {name} last:100` sets the rule for good"
    text = next((text for kind, text in _HINTS if isinstance(error, kind)), None)
    if text is None:
        return None
    ref = typed.get("ref")
    if isinstance(error, errors.CheckpointNotFoundError) and isinstance(store, str):
        became = _fate(error, store)
        text = f"{became}; {text}" if became else text
    said = text.format(
        store=shlex.quote(store) if isinstance(store, str) else "STORE",
        ref=shlex.quote(ref) if isinstance(ref, str) else "REF",
    )
    return _alternative(near, store, typed.get("out")) + said if near is not None and isinstance(store, str) else said


def _fate(error: errors.CheckpointNotFoundError, store: str) -> str | None:
    """Return what the log says of a missing step."""
    if error.step is None:
        return None
    import ckptstore

    try:
        told = ckptstore.open(store, create=False)
        return told.fate(error.step, error.term)
    except (errors.CkptError, OSError):
        return None


def note_damage(store: str, damage: Sequence[str]) -> int:
    """Print the damage that a command found in a store's log and tolerated. Return the exit code; 0: no damage."""
    from ckptstore.cli.output import note

    if not damage:
        return 0
    for one in damage:
        note(one)
    place = shlex.quote(store)
    note(f"`ckpt verify {place}` names all that is damaged; `ckpt repair {place} DST` makes a store of what is intact")
    return errors.CorruptionError.exit_code


def near_names(path: str) -> list[str]:
    """Return names beside `path` that resemble it; none if `path` exists or is not a local path."""
    place = Path(path).expanduser()
    try:
        if "://" in path or place.exists():
            return []
        beside = [one.name for one in place.parent.iterdir() if not one.name.startswith(".")]
    except OSError:
        return []
    return [str(Path(path).parent / name) for name in get_close_matches(place.name, beside, n=1)]


def _store_first(store: Any, typed: Mapping[str, Any]) -> str | None:
    """Return what to type if a REF was written before the STORE."""
    if not isinstance(store, str) or not like_a_ref(store):
        return None
    words = [word for name in _REFS for word in _words(typed.get(name))]
    stores: list[str] = []
    with suppress(OSError, RuntimeError):  # a name that is too long, or ~ of an unknown user
        stores = [one for one in words if Path(one).expanduser().joinpath("FORMAT").is_file()]
    return f"STORE comes before the REF: {shlex.quote(stores[0])} {shlex.quote(store)}" if stores else None


def _words(typed: Any) -> list[str]:
    return [one for one in (typed if isinstance(typed, tuple) else (typed,)) if isinstance(one, str)]


def _no_store(error: errors.StoreNotFoundError, typed: list[Any]) -> str | None:
    path = next((one for one in typed if isinstance(one, str) and _same_place(one, error.url)), None)
    if path is None:
        return "`ckpt import STORE FILE...` creates one; so does ckptstore.open(path, create=True)"
    if error.instead == "file":
        return "STORE is a folder; " + (
            f"a checkpoint file is imported into one: `ckpt import STORE {shlex.quote(path)}`"
            if Path(path).suffix in _FILES
            else "`ckpt ls` lists those that are here"
        )
    if error.instead == "no bucket":  # ckpt does not create buckets
        return None
    if error.instead == "no FORMAT":  # the folder is a store without its FORMAT file: do not suggest another store here
        return f"`ckpt repair {shlex.quote(path)} DST` makes a store of what is there"
    stores = [near for near in near_names(path) if Path(near, "FORMAT").is_file()]
    if "://" not in path and not stores:  # inside the folder of a store: do not suggest another store here
        with suppress(OSError):
            stores = [str(one) for one in Path(path).expanduser().parents if (one / "FORMAT").is_file()]
    if stores:
        return f"did you mean {shlex.quote(stores[0])}?"
    place = Path(path).expanduser()
    if "://" not in path and place.is_dir():
        below = next((one for one in sorted(place.iterdir()) if (one / "FORMAT").is_file()), None)
        if below is not None:
            return f"did you mean {shlex.quote(str(Path(path) / below.name))}? `ckpt ls {shlex.quote(path)}` lists them"
    quoted = shlex.quote(path)
    if "://" not in path and place.is_dir() and not any(place.iterdir()):
        return f"nothing was saved there yet; `ckpt import {quoted} FILE...` makes a store of files"
    return f"`ckpt import {quoted} FILE...` creates one; so does ckptstore.open({path!r}, create=True)"


def _same_place(typed: str, url: str | None) -> bool:
    return url is not None and (typed == url or Path(typed).expanduser() == Path(url).expanduser())


def _alternative(near: str, store: str, out: Any) -> str:
    """Return the command that restores an intact checkpoint instead of a damaged one."""
    name = shlex.quote(str(out)) if out is not None else "FILE"
    return (
        f"{near} is the nearest earlier checkpoint that does not need this segment: "
        f"`ckpt restore {shlex.quote(store)} {near} --out {name}`; "
    )
