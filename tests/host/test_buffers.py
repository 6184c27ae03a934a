"""Aligned memory: its address, its amount, and when it is returned."""

from __future__ import annotations

import errno
import faulthandler
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ckptstore.errors import UsageError
from ckptstore.formats.segment_files.layout import CHUNK
from ckptstore.host.buffers import BLOCK_BYTES, DEFAULT_BUDGET, SLACK, Staging, aligned, region_of

PAGE = 4096


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, (4 << 20) - 1, 4 << 20, (5 << 20) + 3])
def test_memory_begins_on_a_page_and_is_zero(nbytes: int) -> None:
    memory = aligned(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.dtype == np.uint8
    assert memory.flags.writeable
    if nbytes:
        assert memory.ctypes.data % PAGE == 0
        assert not memory.any()
        memory[:] = 7
        assert int(memory[-1]) == 7


def test_more_memory_than_there_is() -> None:
    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(MemoryError, match=str(nbytes)):
            aligned(nbytes)


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that begins here (proc(5), VmFlags)."""
    at_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            begin, end = (int(part, 16) for part in line.split(" ")[0].split("-"))
            at_it = begin <= address < end
        elif at_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no transparent huge pages"
)
def test_large_memory_is_of_huge_pages() -> None:
    small, large = aligned((4 << 20) - PAGE), aligned(4 << 20)
    if not flags_of(large.ctypes.data):
        pytest.skip("the kernel does not say how memory is mapped")
    assert "hg" in flags_of(large.ctypes.data)
    assert "hg" not in flags_of(small.ctypes.data)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            assert option == mmap.MADV_HUGEPAGE
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    memory = aligned(8 << 20)
    memory[:] = 1
    assert len(memory) == 8 << 20


def test_memory_excluded_from_forks() -> None:
    memory, other = aligned(PAGE), aligned(PAGE)
    memory[:] = other[:] = 3
    region = region_of(memory)
    assert region is not None
    region.stay_out_of_forks()
    for looked_at, ends in ((memory, -signal.SIGSEGV), (other, 3)):
        if (child := os.fork()) == 0:
            try:
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os._exit(int(looked_at[0]))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ends


def test_nothing_is_called_once_the_interpreter_ends() -> None:
    """A driver that is gone by then must not be called."""
    script = (
        "import atexit, os\n"
        "atexit.register(os._exit, 0)  # first, so that it comes last: what is unmapped behind it does not count\n"
        "from ckptstore.host.buffers import aligned, region_of\n"
        "kept, gone = aligned(1), aligned(1)\n"
        "region_of(kept).before_unmapping(lambda: print('kept', flush=True))\n"
        "region_of(gone).before_unmapping(lambda: print('gone', flush=True))\n"
        "del gone\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout == b"gone\n"


def test_the_mapping_is_known_by_each_part_of_it_and_goes_with_the_last() -> None:
    memory = aligned(3 * PAGE + 5)
    region = region_of(memory)
    assert region is not None
    assert (region.nbytes, region.address) == (4 * PAGE, memory.ctypes.data)
    calls: list[str] = []
    region.before_unmapping(lambda: calls.append("unmapped"))
    part = memory[PAGE:].view(np.uint8)[3:]
    assert region_of(part) is region
    assert region_of(aligned(1)) is not region
    assert region_of(memory.copy()) is None
    assert region_of(np.zeros(3, np.uint8)) is None
    del memory, region
    gc.collect()
    assert calls == []
    part[:] = 1
    del part
    gc.collect()
    assert calls == ["unmapped"]


def test_a_pool_takes_no_more_than_its_budget() -> None:
    pool = Staging(5 * PAGE + 1, 2 * PAGE)
    assert (pool.blocks, pool.block_bytes) == (2, 2 * PAGE)
    first, second = pool.take(), pool.take()
    assert len(first) == len(second) == 2 * PAGE + SLACK
    assert SLACK == 2 * PAGE, "of a chunk, the rest of the pages in which it begins and ends"
    assert not np.shares_memory(first, second)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(pool.take()))
    waiting.start()
    waiting.join(0.05)
    assert not found
    pool.give(second)
    waiting.join(30)
    assert len(found) == 1
    assert found[0] is second
    pool.give(first)
    with pool.block() as block:
        assert block is first
    with pytest.raises(ValueError, match="is wrong"), pool.block():
        raise ValueError("what is written is wrong")
    assert pool.take() is first, "given back when what used it failed"


def test_blocks_are_made_when_they_are_needed_and_used_again() -> None:
    pool = Staging(8 * PAGE, PAGE)
    first = pool.take()
    pool.give(first)
    assert pool.take() is first


def test_memory_that_is_not_there_costs_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Staging(2 * PAGE, PAGE)

    def none(_nbytes: int) -> None:
        raise MemoryError("none")

    with monkeypatch.context() as patch:
        patch.setattr("ckptstore.host.buffers.aligned", none)
        for _ in range(3):
            with pytest.raises(MemoryError):
                pool.take()
    assert pool.take() is not pool.take()


def test_a_pool_has_two_blocks_at_least() -> None:
    assert Staging(2 * PAGE, PAGE).blocks == 2
    with pytest.raises(UsageError, match="at least 8192 are needed"):
        Staging(2 * PAGE - 1, PAGE)
    assert DEFAULT_BUDGET == 64 << 20, "docs/writer.md"
    assert (Staging().blocks, Staging().block_bytes) == (4, BLOCK_BYTES)


def test_a_pool_for_chunks() -> None:
    for blocks, budget, wanted in ((3, 0, 3), (0, 5 * CHUNK, 5), (3, 5 * CHUNK, 5), (6, 5 * CHUNK, 6)):
        pool = Staging.for_chunks(blocks, budget)
        assert pool.block_bytes >= max(CHUNK, BLOCK_BYTES)
        assert pool.blocks == wanted
    with pytest.raises(UsageError, match="staging budget"):
        Staging.for_chunks(1)
    with pytest.raises(UsageError, match="staging budget 0 bytes"):
        Staging.for_chunks()
