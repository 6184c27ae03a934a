"""Disk images in which a power cut is one system call: a real file system on a loop device, cloned in an instant.

::

    outer image (XFS with reflinks, or btrfs)  --loop-->  mounted
        disk.img (ext4, xfs or btrfs)          --loop-->  mounted: the store's writer works here
        cut.img = FICLONE(disk.img)            --loop-->  mounted: the kernel replays its journal; the store is checked

The clone holds everything that the inner file system had passed to its device at that instant, in order. Data still in
its page cache or its running journal transaction is lost, as in a power cut with a drive that keeps what it received.
(A drive with a volatile cache loses more; `tools.crash.enumerate` models that.)

Needs root, loop devices and the mkfs tools (Debian: ``apt-get install e2fsprogs xfsprogs btrfs-progs``). Run it in its
own mount namespace (`isolated`), so that nothing stays mounted whatever happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["FILE_SYSTEMS", "Rig", "isolated", "make_image", "mounted", "obstacle"]

FILE_SYSTEMS: Final = {
    "ext4": (("mkfs.ext4", "-q", "-F"), ""),
    "xfs": (("mkfs.xfs", "-q", "-f", "-m", "reflink=1"), "nouuid"),  # the clone has the uuid of its original
    "btrfs": (("mkfs.btrfs", "-q", "-f"), ""),
}
"""Inner file system -> (mkfs, mount options)."""
_PACKAGES: Final = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}
_OUTER: Final = ("xfs", "btrfs")
_FICLONE: Final = 0x40049409
_ISOLATED: Final = "CKPTSTORE_POWERCUT_ISOLATED"
_OUTER_SIZE: Final = 6 << 30
"""Bytes, sparse: only what differs between clones takes space."""
_INNER_SIZE: Final = 512 << 20


def isolated(arguments: Sequence[str]) -> int | None:
    """Run this module's caller again in its own mount namespace -> its exit status; None: this already is one."""
    if os.environ.get(_ISOLATED):
        return None
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, _ISOLATED: "1"}, check=False).returncode


@functools.cache
def obstacle(inner: str) -> str | None:
    """Why power cuts of this file system are impossible on this machine; None: they are possible."""
    if not sys.platform.startswith("linux"):
        return "power cuts need Linux"
    if os.geteuid() != 0:
        return "power cuts need root: they mount loop devices"
    if not Path("/dev/loop-control").exists():
        return "power cuts need loop devices, and there is no /dev/loop-control"
    if shutil.which("unshare") is None:
        return "power cuts need unshare (util-linux)"
    if (why := _unmountable(inner)) is not None:
        return why
    missing = [why for outer in _OUTER if (why := _unmountable(outer)) is not None]
    if len(missing) == len(_OUTER):
        return "no file system with reflinks for the outer image: " + "; ".join(missing)
    return None


@functools.cache
def _unmountable(kind: str) -> str | None:
    """Why an image of this kind cannot be made and mounted here; None: it was."""
    if (why := _unmakeable(kind)) is not None:
        return why
    with tempfile.TemporaryDirectory(prefix="ckptstore-powercut-") as folder:
        image, point = Path(folder, "image"), Path(folder, "mounted")
        point.mkdir()
        try:
            make_image(kind, image, 320 << 20)
            # Inside a separate namespace, so that a test that is killed here leaves no mount behind.
            _run("unshare", "--mount", "--propagation", "private", "mount", "-o", "loop", str(image), str(point))
        except OSError as error:
            return f"{kind} cannot be mounted on a loop device here: {error}"
    return None


def _unmakeable(kind: str) -> str | None:
    tool = FILE_SYSTEMS[kind][0][0]
    return None if shutil.which(tool) else f"{tool} is missing (Debian: apt-get install {_PACKAGES[kind]})"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def make_image(kind: str, image: Path, size: int) -> None:
    """Make an empty file system of `size` bytes in the file `image`, sparse. Raises `OSError`."""
    with image.open("wb") as file:
        file.truncate(size)
    _run(*FILE_SYSTEMS[kind][0], str(image))


@contextlib.contextmanager
def mounted(image: Path, point: Path, options: str = "") -> Iterator[Path]:
    """Mount `image` at `point` on a loop device for the length of the ``with``. Raises `OSError`."""
    point.mkdir(exist_ok=True)
    # The kernel frees the loop device with the last mount of it.
    _run("mount", "-o", f"loop,{options}".rstrip(","), str(image), str(point))
    try:
        yield point
    finally:
        _run("umount", str(point))


class Rig:
    """The images, mounted. Use it in a ``with``, in a namespace of its own.

    Attributes:
        outer: the kind of the outer file system.
        disk: where the inner file system is mounted.
    """

    def __init__(self, inner: str, folder: Path | None = None) -> None:
        """Make nothing yet; entering the context does.

        Args:
            inner: one of `FILE_SYSTEMS`.
            folder: where the outer image is made; default: the temporary folder.
        """
        self._inner = inner
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.outer = next(kind for kind in _OUTER if _unmountable(kind) is None)

    def __enter__(self) -> Rig:
        with self._stack as stack:
            work = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptstore-powercut-", dir=self._folder))
            )
            make_image(self.outer, work / "outer.img", _OUTER_SIZE)
            self._images = stack.enter_context(mounted(work / "outer.img", work / "outer"))
            self._point = work / "cut"
            make_image(self._inner, self._images / "disk.img", _INNER_SIZE)
            options = FILE_SYSTEMS[self._inner][1]
            self.disk = stack.enter_context(mounted(self._images / "disk.img", work / "disk", options))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cut(self) -> Path:
        """Cut the power -> the image it leaves, for `after`. One system call; other processes keep running."""
        image = self._images / "cut.img"
        with (self._images / "disk.img").open("rb") as source, image.open("wb") as target:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        return image

    @contextlib.contextmanager
    def after(self, image: Path) -> Iterator[Path]:
        """The disk after the power came back: mounted, its journal replayed. The image is removed at the end.

        Raises:
            OSError: the file system itself cannot be mounted any more.
        """
        try:
            with mounted(image, self._point, FILE_SYSTEMS[self._inner][1]) as point:
                yield point
        finally:
            image.unlink()
