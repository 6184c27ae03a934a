"""Scripts that start warm: they are processes like any other, and compute the same as cold ones."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.kernel_forms import KINDS
from tools.warm import Warm, WarmError

ABOUT = """
import json, os, signal, sys
print(json.dumps({
    "arguments": sys.argv[1:],
    "called": sys.argv[0],
    "main": __name__ == "__main__" and vars(sys.modules["__main__"]) is globals(),
    "folder": os.getcwd(),
    "variable": os.environ.get("OF_THE_SCRIPT"),
    "of the nursery": os.environ.get("OPENBLAS_NUM_THREADS"),
    "path": sys.path[0],
    "input": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpid(),
    "interrupts": str(signal.getsignal(signal.SIGINT)).split(" at ")[0],
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:-1],
    "package": __package__,
}))
print("to errors", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Warm]:
    with Warm(("numpy",)) as found:
        yield found


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def gone(pid: int) -> bool:
    """Wait until a process has ended, for a limited time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30)[0])
    finally:
        os.close(process)


@pytest.mark.parametrize("kind", ["-c", "-m", "path", "package"])
def test_a_script_finds_what_it_would_find_cold(nursery: Warm, tmp_path: Path, kind: str) -> None:
    (tmp_path / "about_me").mkdir()
    for name in ("about.py", "about_me/__main__.py"):
        (tmp_path / name).write_text(ABOUT)
    what = {"-c": ["-c", ABOUT], "-m": ["-m", "about"], "path": ["about.py"], "package": ["-m", "about_me"]}[kind]
    command = [sys.executable, "-W", "ignore", *what, "one", "--two"]
    env = {**os.environ, "OF_THE_SCRIPT": "yes", "OPENBLAS_NUM_THREADS": "1"}
    cold = subprocess.run(
        command,
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    warm = nursery.run(command, cwd=tmp_path, env=env)
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr) == (7, "to errors\n")
    assert json.loads(warm.stdout) == json.loads(cold.stdout)


def test_sigkill_ends_it_and_its_status_is_reported(nursery: Warm) -> None:
    with nursery.start(
        python("print('up', flush=True); import time; time.sleep(60)"), stdout=PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "up\n"
        assert script.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            script.wait(0.01)
        assert Path(f"/proc/{script.pid}/stat").read_text().split()[5] == str(script.pid), "its own session"
        os.kill(script.pid, signal.SIGKILL)
        assert script.wait(120) == -signal.SIGKILL
    script.kill()  # nothing, and no other process with its number
    assert script.poll() == -signal.SIGKILL


def test_it_ends_as_an_interpreter_does(nursery: Warm) -> None:
    code = """
    import atexit, sys, threading, time
    atexit.register(lambda: print("atexit"))
    printed = threading.Event()
    threading.Thread(target=lambda: (printed.wait(), time.sleep(0.05), print("thread"))).start()
    print("main")
    printed.set()
    raise KeyError("what it lacked")
    """
    done = nursery.run(python(code))
    assert (done.returncode, done.stdout) == (1, "main\nthread\natexit\n")
    assert done.stderr.endswith("KeyError: 'what it lacked'\n")
    assert nursery.run(python("raise SystemExit('why')")).stderr == "why\n"


@pytest.mark.parametrize("teardown", [False, True])
def test_modules_are_torn_down_on_request(nursery: Warm, teardown: bool) -> None:
    code = """
    class Late:
        def __del__(self):
            print("torn down")
    import tools.warm
    tools.warm.late = Late()
    print("end")
    """
    assert nursery.run(python(code), teardown=teardown).stdout == "end\n" + "torn down\n" * teardown


@pytest.mark.parametrize("code", ["None", "0", "3", "259", "'why'", "True"])
@pytest.mark.parametrize("teardown", [False, True])
def test_the_exit_status_is_an_interpreter_s(nursery: Warm, code: str, teardown: bool) -> None:
    cold = subprocess.run(python(f"raise SystemExit({code})"), capture_output=True, text=True, check=False)
    warm = nursery.run(python(f"raise SystemExit({code})"), teardown=teardown)
    assert (warm.returncode, warm.stderr) == (cold.returncode, cold.stderr)


def test_ctrl_c_ends_it_by_the_signal(nursery: Warm) -> None:
    assert nursery.run(python("raise KeyboardInterrupt")).returncode == -signal.SIGINT


def test_output_that_nobody_reads_fails(nursery: Warm) -> None:
    """As of an interpreter: what was printed does not get lost with status 0."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with nursery.start(python("input(); print('to nobody')"), env=env, stdin=PIPE, stdout=PIPE, text=True) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdout.close()
        script.stdin.write("\n")
        script.stdin.close()
        assert script.wait(120) == 120


def test_a_script_reads_what_it_is_told(nursery: Warm) -> None:
    with nursery.start(python("print(input()[::-1])"), stdin=PIPE, stdout=PIPE, text=True) as script:
        assert script.stdin is not None
        script.stdin.write("abc\n")
        assert script.communicate(120) == ("cba\n", None)
    with nursery.start(python("import sys; sys.exit(len(sys.stdin.read()))"), stdin=PIPE) as script:
        script.communicate(120)
    assert script.returncode == 0, "it ended by itself, and its input is empty"


@pytest.mark.parametrize("point", ["save.begin", ""])
def test_a_crash_point_of_the_environment_is_armed(warm: Warm, tmp_path: Path, point: str) -> None:
    code = "import sys, ckptstore\nwith ckptstore.open(sys.argv[1]).writer() as writer: writer.save({'a': 1}, 1)"
    done = warm.run(python(code, str(tmp_path / "store")), env={**os.environ, "CKPTSTORE_CRASH_AT": point})
    assert done.returncode == (-signal.SIGKILL if point else 0), done.stderr


def test_each_draws_by_itself(nursery: Warm) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = [nursery.run(python(code)).stdout.split() for _ in range(2)]
    assert len({number for each in drawn for number in each}) == 4


def test_variables_read_by_imports_cannot_change(nursery: Warm, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="OMP_NUM_THREADS is '77'"):
        nursery.run(python("0"), env={**os.environ, "OMP_NUM_THREADS": "77"})
    (tmp_path / "of_the_path.py").write_text("found = 'found'")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert nursery.run(python("import of_the_path; print(of_the_path.found)"), env=env).stdout == "found\n"


@pytest.mark.parametrize("command", [["ls"], [sys.executable], [sys.executable, "-c"], [sys.executable, "-q", "x"]])
def test_other_commands_are_refused(nursery: Warm, command: list[str]) -> None:
    with pytest.raises(ValueError, match=r"script|-W, and then"):
        nursery.start(command)


def test_a_script_starts_another_in_the_same_nursery(nursery: Warm) -> None:
    """The other is the nursery's child, and goes on when the one that started it has ended and closed the nursery."""
    code = """
        import subprocess, sys
        from tools.warm import Warm
        with Warm.borrowed() as warm:
            other = warm.start([sys.executable, "-c", "import os, sys; print(os.getppid(), 'numpy' in sys.modules)"],
                stdout=subprocess.PIPE, text=True)
            told = other.communicate(120)[0]
            waits = warm.start([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        print(told.strip(), waits.pid)
    """
    first = nursery.start(python(code), stdin=nursery.lent, stdout=PIPE, text=True)
    parent, has_numpy, waits = first.communicate(120)[0].split()
    assert has_numpy == "True"
    assert Path(f"/proc/{waits}/stat").read_text().rpartition(")")[2].split()[1] == parent
    os.kill(int(waits), signal.SIGKILL)
    assert nursery.run(python("print(1)"), timeout=60).stdout == "1\n", "it was not closed for its creator"


def test_closing_it_ends_the_started_scripts() -> None:
    with Warm(()) as own:
        script = own.start(python("import time; time.sleep(60)"))
    assert script.wait(120) == -signal.SIGKILL
    with pytest.raises(WarmError, match="gone"):
        own.start(python("0"))


def test_closing_it_does_not_wait_for_forks_of_its_creator() -> None:
    """A worker process of a loader has every descriptor of the process that it was forked from."""
    warm = Warm(())
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(writing)
        os.read(reading, 1)  # until this test ends
        os._exit(0)
    try:
        closing = threading.Thread(target=warm.close, daemon=True)
        closing.start()
        closing.join(120)
        assert not closing.is_alive()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(fork, 0)


def test_scripts_end_with_their_nursery() -> None:
    own = Warm(())
    script = own.start(python("print('up', flush=True); import time; time.sleep(60)"), stdout=PIPE, text=True)
    assert script.stdout is not None
    assert script.stdout.readline() == "up\n"
    nursery = int(Path(f"/proc/{script.pid}/stat").read_text().split()[3])
    os.kill(nursery, signal.SIGKILL)
    assert gone(script.pid)
    with pytest.raises(WarmError, match="gone"):
        script.wait(120)
    script.stdout.close()
    own.close()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "2 threads"),
        ("import that_is_nowhere", "ModuleNotFoundError: No module named 'that_is_nowhere'"),
    ],
)
def test_modules_that_forks_would_suffer_from_are_refused(tmp_path: Path, module: str, why: str) -> None:
    (tmp_path / "imported_first.py").write_text(module)
    with pytest.raises(WarmError, match=why):
        Warm(("imported_first",), cwd=tmp_path)


TRAINS = """
import torch
torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.GELU(), torch.nn.Linear(500, 300))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(256, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.get_num_threads(), sum(one.double().sum() for one in model.parameters()).item().hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unbuffered", "printed"), [("1", "begun\n"), (None, "")])
def test_output_is_unbuffered_if_the_environment_says_so(nursery: Warm, unbuffered: str | None, printed: str) -> None:
    given = {} if unbuffered is None else {"PYTHONUNBUFFERED": unbuffered}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = nursery.run(python("import os; print('begun'); os._exit(0)"), env=kept | given)
    assert done.stdout == printed


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_those_that_the_environment_asks_for(warm: Warm, kind: str) -> None:
    code = "from ckptstore.formats import kernel_choice; print(kernel_choice.kind())"
    assert warm.run(python(code), env={**os.environ, "CKPTSTORE_KERNELS": kind}).stdout == f"{kind}\n"


def test_torch_computes_the_same_in_parallel(warm: Warm) -> None:
    pytest.importorskip("torch")
    cold = subprocess.run(python(TRAINS), capture_output=True, text=True, check=True)
    again = [warm.run(python(TRAINS)) for _ in range(2)]
    assert [one.stdout for one in again] == [cold.stdout] * 2, again
