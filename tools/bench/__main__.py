"""``python -m tools.bench``: the comparison of saving and loading (`save_load`)."""

from tools.bench.storage.save_load import main

main()
