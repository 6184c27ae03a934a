"""Where an agent's process begins: ``python -P startup.py FD PATHS``, started by its trainer.

It is run as a file, so that the package is the trainer's own, wherever that was imported from. ``-P`` and the order of
`sys.path` keep the trainer's files (a ``random.py``) from taking the place of Python's modules.
"""

import importlib.util
import json
import sys
from pathlib import Path


def _package() -> None:
    """Import the package of which this file is a part, whatever else `sys.path` has under its name."""
    folder = Path(__file__).resolve().parents[1]
    found = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if found is None or found.loader is None:
        raise ImportError(f"{folder}: no package")
    module = importlib.util.module_from_spec(found)
    sys.modules[folder.name] = module
    found.loader.exec_module(module)


if __name__ == "__main__":
    sys.path += [path for path in json.loads(sys.argv[2]) if path not in sys.path]
    _package()
    from ckptstore.agent.process import main

    sys.exit(main())
