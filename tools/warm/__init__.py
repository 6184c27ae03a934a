"""Python scripts that start warm: forks of a process that has already imported the slow modules.

    with Warm() as warm:
        script = warm.start([sys.executable, "-m", "tools.examples.train_gpt", "--steps", "3"], stdout=PIPE)
        script.kill()
        assert script.wait() == -signal.SIGKILL

Each script is a process like any other: its own pid and session, arguments, environment, folder and standard streams;
it ends as an interpreter does (`atexit` handlers and threads finish), and SIGKILL ends it at once. It is a child of the
*nursery*, a process of one thread that has computed nothing: no pool of OpenMP, no autograd, no CUDA, no process group.
So a library's first-use work is done in every script again. The nursery reports how each script ended. If the nursery
or its creator dies, so do all scripts that it has started.

Differences from a cold interpreter: settings that modules read from the environment at import (`OMP_NUM_THREADS`, ...)
are the nursery's, so other values are refused; hashes of texts have one seed in all scripts; the process ends after its
last `atexit` handler, without a teardown of modules (``teardown=True``: with one).
"""

from __future__ import annotations

from tools.warm.script import Script, WarmError
from tools.warm.starting import MODULES, Warm

__all__ = ["MODULES", "Script", "Warm", "WarmError"]
