"""Counts what one operation executes: ``python -m tools.entered [--json]``.

For one ``save_async`` of 12,000 small tensors, one ``Checkpointer.step()``, one ``load`` and one ``tag``: how many
functions and modules of the package run, in the calling thread and in all, and in how many threads. Counted with
``sys.setprofile``; the second call is counted, so that one-time work is not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
import numpy as np
import torch

import ckptstore
from ckptstore.training import Checkpointer

__all__ = ["Entered", "counted", "main"]

_ROOTS: Final = tuple(str(Path(__file__).resolve().parents[1] / room) for room in ("ckptstore", "cli", "formats"))
_INLINE: Final = {"<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}
TENSORS: Final = 12_000


@dataclass(frozen=True, slots=True)
class Entered:
    """The executed part of the package.

    Attributes:
        functions, modules: in the thread that called.
        all_functions, all_modules: in all threads, until the operation was finished.
        threads: how many threads ran any of it.
    """

    functions: int
    modules: int
    all_functions: int
    all_modules: int
    threads: int


@contextmanager
def counted() -> Iterator[Callable[[], Entered]]:
    """Count within the block. Running threads are counted as well."""
    seen: set[tuple[int, str, int, str]] = set()
    caller = threading.get_ident()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOTS) and code.co_name not in _INLINE:
            seen.add((threading.get_ident(), code.co_filename, code.co_firstlineno, code.co_name))

    def found() -> Entered:
        mine = {one[1:] for one in seen if one[0] == caller}
        everything = {one[1:] for one in seen}
        return Entered(
            len(mine),
            len({one[0] for one in mine}),
            len(everything),
            len({one[0] for one in everything}),
            len({one[0] for one in seen}),
        )

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else threading.setprofile(None)


def operations(folder: Path) -> Iterator[tuple[str, Entered]]:
    """Each operation and its counts; stores are made below `folder`."""
    state = {str(number): np.full(8, number, np.float32) for number in range(TENSORS)}
    with ckptstore.open(folder / "async") as store, counted() as found, store.writer() as writer:
        # The writer's threads start within the block: before Python 3.12 no others are counted.
        writer.save_async(state, 1).result()
        yield f"save_async, {TENSORS:,} tensors, with opening the writer", found()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(folder / "step", model=model, optimizer=optimizer, strategy="full") as checkpointer:
        checkpointer.resume()
        for step in range(4):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            checkpointer.wait()
            if step < 3:
                checkpointer.step()
                continue
            with counted() as found:
                checkpointer.step()
            yield "step()", found()
    with ckptstore.open(folder / "step") as store:
        store.load()
        with counted() as found:
            store.load()
        yield "load", found()
        store.tag("first", "latest", take_over=True)
        with counted() as found:
            store.tag("second", "latest", take_over=True)
        yield "tag", found()


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(as_json: bool) -> None:
    """Run the command: see the module."""
    with tempfile.TemporaryDirectory(prefix="entered-") as folder:
        found = dict(operations(Path(folder)))
    if as_json:
        click.echo(json.dumps({name: asdict(one) for name, one in found.items()}, indent=2))
        return
    click.echo(f"{'':58}{'caller':>20}{'all threads':>22}")
    click.echo(f"{'operation':58}{'functions':>11}{'modules':>9}{'functions':>13}{'modules':>9}{'threads':>9}")
    for name, one in found.items():
        click.echo(
            f"{name:58}{one.functions:11}{one.modules:9}{one.all_functions:13}{one.all_modules:9}{one.threads:9}"
        )


if __name__ == "__main__":
    main()
