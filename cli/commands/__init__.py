"""Holds one module per command, imported when its command runs. `ckptstore.cli.main.COMMANDS` lists them.

The modules may import what `cli` may import.
"""
