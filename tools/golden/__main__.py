"""Make every golden file again: ``python -m tools.golden``. See `tools.golden`."""

from tools.golden.everything import main

main()
