"""Holds one module per command, imported when its command runs. `ckptstore.cli.main.COMMANDS` lists them.

Imports what `cli` may import.
"""
