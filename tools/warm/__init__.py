"""Python scripts that begin warm: forked by a process that has imported already what takes seconds to import.

    with Warm() as warm:
        script = warm.start([sys.executable, "-m", "tools.examples.train_gpt", "--steps", "3"], stdout=PIPE)
        script.kill()
        assert script.wait() == -signal.SIGKILL

What is started is a process like any other: its own pid and session, arguments, environment, folder and standard
streams; it ends as an interpreter does (what `atexit` and threads have to do is done), and SIGKILL takes it as it is.
It is a child of the *nursery*, a process of one thread that has computed nothing: no pool of OpenMP, no autograd, no
CUDA, no process group. So what a library does at its first use it does in every script anew. The nursery says how each
ended. If it goes, or whoever made it, so do all scripts that it has started.

What is not as in an interpreter that begins cold: what modules read from the environment when they are imported
(`OMP_NUM_THREADS`, ...) is the nursery's, so that other values are refused; hashes of texts have one seed in all.
"""

from __future__ import annotations

from tools.warm.script import Script, WarmError
from tools.warm.starting import MODULES, Warm

__all__ = ["MODULES", "Script", "Warm", "WarmError"]
