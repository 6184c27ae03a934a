"""Pages whose blocks run one after the other in one folder: scripts, and commands with their output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ckptstore.formats import kernel_choice
from tests import warmth

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PLAIN = re.compile(r"((?:[A-Z_]+=\w+ )*)(python|ckpt) ([^|&;<>$'\"*?~`#]*?)(?P<last> 2>&1 \| tail -n 1)?")
"""A line that runs only a process of ours; it may end with ``| tail -n 1``."""
_CODE = re.compile(r'python -c "([^"$`\\!]*)"')
"""A line that runs code in which a shell replaces nothing."""


def plain(text: str) -> list[str]:
    """Lines without the parts that differ from run to run: sizes, times, ids, processes, and the spaces that align
    them."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r"[\d.,]+ (B|KiB|MiB|GiB)\b", "SIZE", text)
    text = re.sub(r"[\d.]+ (ms|s)\b", "SECONDS", text)
    text = re.sub(r"SIZE/s|loss [\d.e-]+", "NUMBER", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def played(text: str, folder: Path) -> str:
    """The page with the present output of its commands.

    A Python block that begins with the comment ``# NAME.py`` is written to that file; any other Python block runs.
    Every ``$ LINE`` of a console block is passed to a shell; its output follows, stderr included, and ``[exit N]``
    unless N is 0.
    """
    scripts = Path(sys.executable).parent
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CKPT", "PYTEST"))},
        **{name: value for name, value in os.environ.items() if name == kernel_choice.VARIABLE},
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }

    def printed_by(words: list[str], given: dict[str, str]) -> tuple[str, int]:
        """The output and the exit status of one of our scripts."""
        with warmth.nursery().start(
            [sys.executable, *words],
            cwd=folder,
            env=environment | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as script:
            return script.communicate()[0], script.wait()

    def ran(line: str) -> tuple[str, int]:
        """The output and the exit status of a line."""
        first, both, second = line.partition(" && ")
        if both:
            printed, code = ran(first)
            if code:
                return printed, code
            more, code = ran(second)
            return printed + more, code
        if (given_code := _CODE.fullmatch(line)) is not None:
            return printed_by(["-c", given_code[1]], {})
        if plain := _PLAIN.fullmatch(line):
            given = dict(word.split("=") for word in plain[1].split())
            module = ["-m", "ckptstore"] if plain[2] == "ckpt" else []
            printed, code = printed_by([*module, *shlex.split(plain[3])], given)
            if plain["last"]:
                printed, code = "".join(printed.splitlines(keepends=True)[-1:]), 0
        else:
            done = subprocess.run(
                ["sh", "-c", line],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            printed, code = done.stdout, done.returncode
        return printed, code

    def said(line: str) -> str:
        printed, code = ran(line)
        code = code if code >= 0 else 128 - code
        # Shells report a killed process in different words.
        told = re.sub(r"^(Killed\n|.*\bKilled\s.*\n)", "", printed, flags=re.MULTILINE)
        told = re.sub(r"host \S+, pid \d+", "host node-7, pid 411", told)
        told = re.sub(r"process \d+ on this host", "process 411 on this host", told)
        ending = "" if told.endswith("\n") or not told else "\n"
        return told + ending + (f"[exit {code}]\n" if code else "")

    def played_block(match: re.Match[str]) -> str:
        language, body = match.groups()
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", body):
                (folder / name[1]).write_text(body)
            else:
                printed, code = printed_by(["-W", "error", "-c", body], {})
                assert code == 0, printed
            return match.group(0)
        lines = [line for line in body.splitlines() if line.startswith("$ ")]
        parts = (f"{line}\n{said(line[2:])}" for line in lines)
        return f"```console\n{''.join(parts)}```"

    return _BLOCK.sub(played_block, text)
