"""Run an examination in order: software, machine, medium, and the store itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptstore.backends import open_backend
from ckptstore.doctor.buckets import examine_bucket
from ckptstore.doctor.clocks import against_files
from ckptstore.doctor.disks import examine_disk, probe_folder
from ckptstore.doctor.findings import Diagnosis, Finding, Tell
from ckptstore.doctor.machine import examine_machine
from ckptstore.doctor.number_text import counted, span
from ckptstore.doctor.software import examine_software
from ckptstore.errors import CkptError, StoreNotFoundError
from ckptstore.log.checkpoint_info import describe_all
from ckptstore.log.log_reader import damaged_folds, read
from ckptstore.store import Store

__all__ = ["examine"]

_FOLDERS = frozenset({"", "file", "pmem"})


def examine(place: str | None = None, *, quick: bool = False, tell: Tell = lambda _: None) -> Diagnosis:
    """Report what works here, what is slow, and what to do about it.

    Args:
        place: path or URL of a store, existing or planned; None: the working folder. Files are written in its folder
            (or the nearest existing folder above), or objects below its prefix, and removed again.
        quick: measure no speeds, and do not import torch: under half a second.
        tell: called with the name of the next part.

    Returns:
        the findings. A failure is a finding, too: it is not raised.
    """
    begin = time.perf_counter()
    findings: list[Finding] = []
    tell("software")
    findings += examine_software(quick=quick)
    tell("processor and memory")
    findings += examine_machine(quick=quick)
    scheme = "" if place is None or "://" not in place else urlsplit(place).scheme.lower()
    tell("disk" if scheme in _FOLDERS else "medium")
    if scheme == "memory":
        findings.append(Finding("medium", "medium", "careful", "the memory of one process: lost when it ends"))
    elif scheme in _FOLDERS:
        findings += _folder(place if place is not None else ".", scheme, quick=quick)
    else:
        findings += examine_bucket(place or "", quick=quick)
    if place is not None:
        tell("store")
        findings.append(_store(place))
    return Diagnosis(place or os.fspath(Path.cwd()), quick, tuple(findings), time.perf_counter() - begin)


def _folder(place: str, scheme: str, *, quick: bool) -> Iterator[Finding]:
    path = Path(unquote(urlsplit(place).path) if scheme else place).expanduser().absolute()
    where = next((one for one in (path, *path.parents) if one.is_dir()), Path("/"))
    try:
        with probe_folder(where) as folder:
            yield from examine_disk(folder, where, quick=quick)
            yield against_files(folder)
    except OSError as error:
        what = f"nothing can be written in {where}: {error.strerror or error}"
        do = "give this user the folder, or use another folder for the store; existing checkpoints can still be read"
        yield Finding("medium", "writing", "fails", what, do)


def _store(place: str) -> Finding:
    """Report whether a store exists, and the state of its log. Reads the log, and no segment."""
    try:
        store = Store(open_backend(place, create=False))
        view = read(store.journal, tell=False)
        infos, damage = describe_all(view.catalog), len(view.damage) + len(damaged_folds(store.journal, view))
    except StoreNotFoundError as error:
        if Path(place).is_file():
            return Finding("store", "store", "fails", str(error), "name the folder of a store")
        return Finding("store", "store", "absent", "none here yet: the first writer creates one")
    except (CkptError, OSError) as error:
        do = "`ckpt verify` lists the damage, `ckpt repair` makes a store of the intact checkpoints"
        return Finding("store", "store", "fails", str(error), do)
    values = {"checkpoints": len(infos), "latest": infos[-1].ref if infos else None, "damage": damage}
    if damage:
        what = f"{counted(damage, 'object')} of its log {'is' if damage == 1 else 'are'} damaged or missing"
        return Finding("store", "store", "fails", what, "`ckpt verify` lists the lost checkpoints", values)
    if not infos:
        return Finding("store", "store", "works", "a store without checkpoints", None, values)
    newest = max(infos, key=lambda info: info.time)
    ahead = newest.time - time.time()
    what = f"{counted(len(infos), 'checkpoint')}, the newest {newest.ref}"
    if ahead > 2:
        what += f", whose time is {span(ahead)} in the future: the clocks of the writer and of this machine differ"
        return Finding("store", "store", "careful", what, "synchronise the clocks (chrony, NTP)", values)
    return Finding("store", "store", "works", what, None, values)
