"""The script with which a trainer starts an agent's process: ``python -P startup.py FD PATHS``.

The trainer runs it as a file, so the agent runs the trainer's own package, wherever that was imported from. ``-P`` and
the order of `sys.path` keep a file of the trainer (a ``random.py``) from replacing one of Python's modules.
"""

import importlib.util
import json
import sys
from pathlib import Path


def _package() -> None:
    """Import the package that this file belongs to, even if `sys.path` has another of the same name."""
    folder = Path(__file__).resolve().parents[1]
    found = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if found is None or found.loader is None:
        raise ImportError(f"{folder}: not a package")
    module = importlib.util.module_from_spec(found)
    sys.modules[folder.name] = module
    found.loader.exec_module(module)


if __name__ == "__main__":
    sys.path += [path for path in json.loads(sys.argv[2]) if path not in sys.path]
    _package()
    from ckptstore.agent.process import main

    sys.exit(main())
