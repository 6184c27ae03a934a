"""Compare this machine's clock with the clocks that stamp files and answer requests."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

from ckptstore.doctor.findings import Finding
from ckptstore.doctor.number_text import span

__all__ = ["against_files", "against_server"]

_FILES_MAY: Final = 2.0
"""Tolerated seconds: some file systems stamp in whole or in even seconds."""
_SERVERS_MAY: Final = 60.0
_SIGNATURES_MAY: Final = 900.0
"""S3 refuses signed requests if the clocks differ by more seconds."""


def against_files(folder: Path) -> Finding:
    """Compare the clock with the modification time of a new file. Raises `OSError`."""
    path = folder / "clock"
    before = time.time()
    path.write_bytes(b"now")
    after = time.time()
    stamp = path.stat().st_mtime
    ahead = max(before - stamp, stamp - after, 0.0)
    values = {"difference": ahead, "against": "files"}
    if ahead > _FILES_MAY:
        what = f"files made here are stamped {span(ahead)} off this machine's time: another machine holds the disk"
        return Finding(
            "medium", "clock", "careful", what, "synchronise the clocks (chrony, NTP): pins and ages use them", values
        )
    return Finding("medium", "clock", "works", "files made here are stamped with this machine's time", None, values)


def against_server(url: str) -> Finding:
    """Compare the clock with the Date header of a server's answer, whatever its status. Sends no credentials."""
    before = time.time()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            header = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # 403 and 405 are answers, too
        header = error.headers.get("Date")
    except (OSError, ValueError) as error:
        what = f"could not be compared: {url} does not answer ({type(error).__name__})"
        return Finding("medium", "clock", "absent", what)
    after = time.time()
    if header is None:
        return Finding("medium", "clock", "absent", f"could not be compared: {url} sends no Date header")
    stamp = parsedate_to_datetime(header).timestamp()
    difference = max(before - stamp - 1, stamp - after, 0.0)  # the header is in whole seconds
    values = {"difference": difference, "against": "server"}
    if difference > _SIGNATURES_MAY:
        what = f"{span(difference)} off the server's: signed requests are refused from 15 min on"
        return Finding("medium", "clock", "fails", what, "set the clock (chrony, NTP)", values)
    if difference > _SERVERS_MAY:
        what = f"{span(difference)} off the server's"
        return Finding("medium", "clock", "careful", what, "synchronise the clock (chrony, NTP)", values)
    return Finding("medium", "clock", "works", "agrees with the server's", None, values)
