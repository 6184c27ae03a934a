"""Work without a count shows on a terminal that it continues, and leaves nothing there."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time

import pytest

from ckptstore.cli.spinner import patience

PATIENCE = 120.0


def test_on_a_terminal_it_says_for_how_long() -> None:
    main, other = os.openpty()
    shown = b""
    with open(other, "w") as terminal, contextlib.redirect_stderr(terminal):
        with patience("inspecting", every=0.01):
            end = time.monotonic() + PATIENCE
            while b" s" not in shown and time.monotonic() < end:
                if select.select([main], [], [], 0.1)[0]:
                    shown += os.read(main, 4096)
        print("end", file=terminal, flush=True)
        while b"end" not in shown:
            shown += os.read(main, 4096)
    os.close(main)
    assert re.search(rb"inspecting: \d+ s", shown)  # 0, unless the machine was stalled
    assert shown.endswith(b"\r\x1b[Kend\r\n")


def test_fast_work_and_a_pipe_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with patience("inspecting", every=0.001):
        time.sleep(0.02)
    assert capfd.readouterr() == ("", "")
    main, other = os.openpty()
    with open(other, "w") as terminal, contextlib.redirect_stderr(terminal):
        with patience("inspecting", every=60):
            pass
        print("end", file=terminal, flush=True)
        assert os.read(main, 4096) == b"end\r\n"
    os.close(main)
