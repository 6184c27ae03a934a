"""One module per command, each imported only when its command runs; the list is `ckptstore.cli.main.COMMANDS`.

Import what `cli` may.
"""
