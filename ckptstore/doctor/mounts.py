"""Find the file system of a folder, and judge it as a place for a store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptstore.doctor.findings import Finding

__all__ = ["Mount", "judged", "mount_of"]

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "glusterfs", "beegfs", "afs", "wekafs"}
    | {"panfs", "orangefs", "9p", "virtiofs", "vboxsf"}
)
_LOCAL: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        kind: the kernel's name: ``ext4``, ``nfs4``, ``fuse.sshfs``; empty: unknown.
        point: where it is mounted.
        dax: whether its files are mapped without a page cache, as on persistent memory.
    """

    kind: str
    point: str
    dax: bool = False

    @property
    def network(self) -> bool:
        """Whether another machine holds it or may write to it."""
        return self.kind in _NETWORK or self.kind.startswith("fuse")


def mount_of(folder: Path) -> Mount:
    """Find the mount that contains `folder`; its fields are empty if ``/proc`` does not say."""
    device, best = None, Mount("", "")
    with suppress(OSError):
        number = folder.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
    real = os.path.realpath(folder)
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            fields, kinds = before.split(), after.split()
            point = fields[4].encode().decode("unicode_escape")  # a space is \040
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            # If mounts are stacked on one point, the last one counts. A folder in an overlay has another device number
            # than its mount: there the longest path decides.
            if inside and len(point) >= len(best.point) and (fields[2] == device or len(point) > len(best.point)):
                options = f"{fields[5]},{kinds[-1]}".split(",")
                best = Mount(
                    kinds[0], point, any(option.startswith("dax") and option != "dax=never" for option in options)
                )
    return best


def judged(mount: Mount) -> Finding:
    """The finding about a store on this file system."""
    values = {"kind": mount.kind, "mounted_at": mount.point}
    where = f"{mount.kind or 'unknown'}, mounted at {mount.point or '?'}"
    if mount.network:
        what = f"{where}: a network or user-space file system: a store is only as safe as its link() and fsync()"
        do = "save to a local disk, and `ckpt copy` from there; or to a bucket. Let one machine write at a time"
        return Finding("medium", "file system", "careful", what, do, values)
    if mount.kind in ("tmpfs", "ramfs"):
        what = f"{where}: this is memory: everything on it is lost when the machine restarts"
        return Finding(
            "medium", "file system", "careful", what, "save to a disk: a power cut loses everything here", values
        )
    if mount.kind in ("overlay", "aufs"):
        what = f"{where}: a container's own layer, which is deleted with the container"
        return Finding("medium", "file system", "careful", what, "mount a volume, and save there", values)
    if mount.kind in _LOCAL:
        return Finding("medium", "file system", "works", where, None, values)
    what = f"{where}: never tested with a store; it needs link() or renameat2(), and a reliable fsync()"
    return Finding(
        "medium", "file system", "careful", what, "try `ckpt doctor` without --quick, and keep a copy", values
    )
