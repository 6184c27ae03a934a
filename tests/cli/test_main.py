"""The command group: its commands, imports and errors."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptstore import errors
from ckptstore.cli import error_output, main
from tests.cli.conftest import DOCS, Run, documented

COMMAND = [sys.executable, "-c", "from ckptstore.cli.main import main; main()"]


def test_help_lists_every_command_without_importing_it(ckpt: Run) -> None:
    outcome = ckpt("--help")
    assert outcome.code == 0
    assert re.findall(r"^  (\w+) +[A-Z]", outcome.out.split("\nLook:")[1], re.M)[: len(main.COMMANDS)] == list(
        main.COMMANDS
    )


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_a_summary_and_an_example(ckpt: Run, name: str) -> None:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    assert (command.help or "").split("\n")[0] == main.COMMANDS[name][1]
    outcome = ckpt(name, "--help")
    assert outcome.code == 0
    assert f"ckpt {name} " in outcome.out.split("Examples:")[1]
    assert "--json" in outcome.out
    assert f"\n## ckpt {name}\n" in DOCS.read_text()


def test_version(ckpt: Run) -> None:
    assert re.fullmatch(r"ckpt \d+\.\d+\.\d+\S* \(format 1\)\n", ckpt("--version").out)


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], "numpy fsspec torch rich ml_dtypes json ckptstore.store"),
        (["restore", "--help"], "numpy fsspec torch rich ml_dtypes ckptstore.store"),
        (["log"], "numpy fsspec torch rich ml_dtypes"),
        (["completion", "bash"], "numpy fsspec torch rich ml_dtypes"),
        (["verify"], "fsspec torch rich"),
        (["restore", "--out"], "fsspec torch rich"),
    ],
)
def test_a_command_imports_only_what_it_needs(
    pristine: Path, tmp_path: Path, arguments: list[str], forbidden: str
) -> None:
    full = {"log": ["log", pristine], "verify": ["verify", pristine]}.get(arguments[0], arguments)
    if "--out" in arguments:
        full = ["restore", pristine, "--out", tmp_path / "out.pt"]
    script = f"""
import sys
from ckptstore.cli.main import cli
try:
    cli.main({[str(word) for word in full]!r}, prog_name="ckpt")
except SystemExit as error:
    assert error.code == 0, error.code
loaded = set({forbidden.split()!r}) & sys.modules.keys()
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def error_classes() -> list[type[errors.CkptError]]:
    found: list[type[errors.CkptError]] = []
    waiting = [errors.CkptError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__ == errors.__name__:  # others are within the engine: no user gets one
            found.append(kind)
        waiting.extend(kind.__subclasses__())
    return found


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_every_error_is_one_line_and_its_exit_code(
    ckpt: Run, monkeypatch: pytest.MonkeyPatch, kind: type[errors.CkptError]
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise kind("what went wrong: runs/gpt")

    monkeypatch.setattr("ckptstore.cli.commands.log.opened", fail)
    outcome = ckpt("log", "runs/gpt")
    assert outcome.code == kind.exit_code
    assert outcome.out == ""
    assert outcome.err.splitlines()[0] == "error: what went wrong: runs/gpt"
    assert all(line.startswith("hint: ") for line in outcome.err.splitlines()[1:])

    as_json = ckpt("log", "runs/gpt", "--json")
    assert as_json.code == kind.exit_code
    assert as_json.json["error"] | {"hint": None} == {
        "type": kind.__name__,
        "message": "what went wrong: runs/gpt",
        "hint": None,
        "exit_code": kind.exit_code,
    }


def test_the_error_document_is_the_documented_one(ckpt: Run, pristine: Path) -> None:
    (shown,) = documented("Errors")
    outcome = ckpt("inspect", pristine, "99", "--json")
    assert outcome.json["error"].keys() == shown["error"].keys()
    assert outcome.json["error"]["exit_code"] == outcome.code == 3


def test_there_is_one_table_of_exit_codes(ckpt: Run) -> None:
    known = {kind.exit_code for kind in error_classes()}
    known |= {0, error_output.INTERNAL, error_output.INTERRUPTED, error_output.CLOSED_PIPE, error_output.TERMINATED}
    assert set(errors.EXIT_CODES) == known
    table = DOCS.read_text().split("**Exit codes** are stable:")[1].split("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == list(errors.EXIT_CODES)
    shown = (DOCS.parents[1] / "README.md").read_text()
    assert {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.*) \|$", shown, re.M)} == {
        code: text.replace("|", "\\|") for code, text in errors.EXIT_CODES.items()
    }
    listed = ckpt("--help").out.split("Exit codes:")[1]
    assert {int(code): text for code, text in re.findall(r"^ +(\d+)  (.*)$", listed, re.M)} == errors.EXIT_CODES


def test_the_tree_of_errors_is_the_documented_one() -> None:
    told = re.findall(r"^[ │├└─]*(\w+Error)(?: \((\w+)\))? *(\d+)?", errors.__doc__ or "", re.M)
    assert sorted(name for name, _, _ in told) == sorted(kind.__name__ for kind in error_classes())
    for name, other, code in told:
        kind = getattr(errors, name)
        assert not other or other in [base.__name__ for base in kind.__bases__], name
        if code:
            assert kind.exit_code == int(code), name
        else:
            assert kind.exit_code == kind.__bases__[0].exit_code, name


def test_a_note_on_an_error_is_its_hint(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        error = errors.StorageError(28, "No space left on device", "/data/run")
        error.add_note("free some")
        raise error

    monkeypatch.setattr("ckptstore.cli.commands.log.opened", fail)
    assert ckpt("log", "x").err == "error: /data/run: No space left on device\nhint: free some\n"


def test_a_bug_is_no_traceback_unless_asked_for(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("ckptstore.cli.commands.log.opened", fail)
    outcome = ckpt("log", "x")
    assert outcome.code == 70
    assert outcome.err.startswith("error: unexpected ZeroDivisionError: oops\nhint: run again with --debug")
    for arguments in (["log", "x", "--debug"], ["--debug", "log", "x"]):
        with pytest.raises(ZeroDivisionError):
            ckpt(*arguments)


def test_other_errors_of_the_system_are_storage_errors(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/x")

    monkeypatch.setattr("ckptstore.cli.commands.log.opened", fail)
    outcome = ckpt("log", "x")
    assert (outcome.code, outcome.err) == (8, "error: /root/x: Permission denied\n")


def test_interruption(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptstore.cli.commands.log.opened", interrupt)
    outcome = ckpt("log", "x")
    assert outcome.code == 130
    assert outcome.err.strip() == "error: interrupted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lgo"], "there is no command 'lgo'; did you mean 'log'?"),
        (["frobnicate"], "there is no command 'frobnicate'"),
        (["log", "x", "--bogus"], "No such option"),
        (["log", "x", "y", "z"], "unexpected extra argument"),
        (["restore", "x"], "Missing option '--out'"),
        (["import", "x"], "Missing argument 'FILE...'"),
        (["import", "x", "y", "--step", "soon"], "'soon' is neither a step nor 'auto'"),
        (["restore", "x", "--out", "y", "--max-shard-size", "5 parsecs"], "is not a size"),
        (["log", "x", "-n", "-1"], "-1"),
    ],
)
def test_usage_errors(ckpt: Run, arguments: list[str], message: str) -> None:
    outcome = ckpt(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert message in outcome.err
    assert "--help`" in outcome.err.splitlines()[-1]


def test_without_arguments_the_help_is_the_message(ckpt: Run) -> None:
    for arguments in ([], ["log"]):
        outcome = ckpt(*arguments)
        assert outcome.code == 2
        assert "Usage: ckpt" in outcome.err


# Real processes


def test_exit_codes_reach_the_shell(pristine: Path, tmp_path: Path) -> None:
    def code(*arguments: object) -> int:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        ).returncode

    assert code("log", pristine) == 0
    assert code("log", tmp_path / "nothing") == 3
    assert code("log", pristine, "--bogus") == 2


def test_a_file_that_ends_too_early_is_no_interruption(pristine: Path) -> None:
    script = (
        "import ckptstore.store, sys\n"
        "def broken(*_, **__): raise EOFError('Ran out of input')\n"
        "ckptstore.store.open = broken\n"
        "import ckptstore; ckptstore.open = broken\n"
        "from ckptstore.cli.main import main; sys.argv = ['ckpt', 'log', sys.argv[1]]; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, pristine], capture_output=True, text=True, check=False)
    assert done.returncode == error_output.INTERNAL, done
    assert "EOFError: Ran out of input" in done.stderr
    assert "interrupted" not in done.stderr


def test_a_closed_pipe_is_quiet(pristine: Path) -> None:
    process = subprocess.Popen([*COMMAND, "log", pristine], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything is written: the first write fails on a closed pipe
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait() == error_output.CLOSED_PIPE
    assert complaint == b""


def shell(line: str, store: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``ckpt`` is the command and ``$0`` the store."""
    script = f'ckpt() {{ {shlex.join(COMMAND)} "$@"; }}; {line}'
    return subprocess.run(["/bin/sh", "-c", script, str(store)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_closed_stream_is_as_dev_null(pristine: Path, closed: str, form: str) -> None:
    done = shell(f'ckpt log "$0" {form} {closed}', pristine)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == (">&-" in closed.split())
    assert shell(f'ckpt log "$0.not" {form} {closed}', pristine).returncode == 3


def test_no_file_gets_the_number_of_a_closed_stream(pristine: Path) -> None:
    script = "import os, sys; from ckptstore.cli.main import cli, main; sys.argv[:] = ['ckpt', '--version']\n"
    script += "cli.main = lambda **_: os._exit(os.open(sys.executable, os.O_RDONLY))\nmain()"
    done = shell(f"{shlex.join([sys.executable, '-c', script])} <&- >&- 2>&-", pristine)
    assert done.returncode > 2


def test_a_file_is_not_restored_to_a_closed_stdout(pristine: Path) -> None:
    done = shell('ckpt restore "$0" --out - >&-', pristine)
    assert done.returncode == 2
    assert "stdout, which is closed here" in done.stderr


@pytest.mark.parametrize("command", ["log", "ls", "stats", "verify", "tag", "keep", "inspect", "watch --once"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_full_stdout_is_an_error_in_one_line(pristine: Path, command: str, form: str) -> None:
    name, *options = command.split()
    done = shell(f'ckpt {name} "$0" {" ".join(options)} {form} >/dev/full', pristine)
    assert done.returncode == 8
    assert done.stderr == "error: No space left on device\n"


def test_a_full_stderr_leaves_the_exit_code(pristine: Path) -> None:
    assert shell('ckpt log "$0.not" 2>/dev/full', pristine).returncode == 3


@pytest.mark.parametrize("encoding", ["latin-1", "cp437", "ascii"])
def test_a_terminal_without_unicode(pristine: Path, encoding: str) -> None:
    """Characters that it lacks are written as escapes. For ascii click uses UTF-8; for others it raises an error."""

    lines = [["--state"], ["--tensor", "model.embedding.weight"], ["5→"]]
    script = """
import sys
from ckptstore.cli.main import main
for line in eval(sys.argv.pop()):
    sys.argv[1:] = line
    try:
        main()
    except SystemExit as ended:
        for stream in (sys.stdout, sys.stderr):
            print(f"\\x1e{ended.code}\\x1e", end="", file=stream, flush=True)
"""
    command = [sys.executable, "-c", script, ascii([["inspect", str(pristine), *line] for line in lines])]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}, check=False)
    assert done.returncode == 0, done.stderr
    out, err = done.stdout.split(b"\x1e"), done.stderr.split(b"\x1e")
    assert out[1::2] == err[1::2] == [b"0", b"0", b"2"]
    tree, bars, nothing, _ = out[::2]
    assert err[:4:2] == [b"", b""]
    branch = {"latin-1": b"\\u251c\\u2500\\u2500 model", "cp437": "├── model".encode("cp437")}
    assert branch.get(encoding, "├── model".encode()) in tree
    assert b"one bar per power of two" in bars
    arrow = b"\\u2192" if encoding != "ascii" else "→".encode()
    assert nothing == b""
    assert err[4].startswith(b"error: '5" + arrow + b"' is not a REF")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_no_temporary_file(pristine: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Stop inside the export, deterministically: the first chunk of a tensor waits. A background process, as CI may be,
    # inherits an ignored SIGINT, and so would ours.
    script = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import ckptstore.exchange.torch_archive as archive
write = archive.write_archive
def slow(*arguments):
    print("inside", flush=True)
    time.sleep(600)
    return write(*arguments)
import ckptstore.exchange.export as exporting
exporting.write_archive = slow
from ckptstore.cli.main import main
main()
"""
    out = tmp_path / "out.pt"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "restore", pristine, "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    assert list(tmp_path.iterdir()), "a temporary file while it works"
    process.send_signal(number)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in complaint
    assert not list(tmp_path.iterdir())


def test_commands_are_listed_by_what_they_are_for(ckpt: Run) -> None:
    text = ckpt("--help").out
    assert [title for title in main.GROUPS if f"\n{title}:\n" in text] == list(main.GROUPS)
    assert sorted(name for group in main.GROUPS.values() for name in group) == sorted(main.COMMANDS)


@pytest.mark.parametrize("name", ["show", "list", "export", "fsck", "du"])
def test_commands_that_people_try(ckpt: Run, name: str) -> None:
    outcome = ckpt(name, "runs/gpt")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: there is no command '{name}'\nhint: `ckpt ")
    meant = outcome.err.split("`ckpt ")[1].split("`")[0]
    assert meant in main.COMMANDS or meant.split()[0] in main.COMMANDS


def test_a_flipped_byte_of_format_is_damage(ckpt: Run, run: Path) -> None:
    """Not another format: docs/cli.md promises exit code 4 for bytes that differ from the written ones."""
    content = (run / "FORMAT").read_bytes()
    for place in range(0, len(content), 9):
        (run / "FORMAT").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        outcome = ckpt("log", run)
        assert outcome.code == 4, (place, outcome.err)
        assert "this file is damaged" in outcome.err
    for content in (b"", b"cut short"):
        (run / "FORMAT").write_bytes(content)
        assert ckpt("log", run).code == (5 if content else 4)
