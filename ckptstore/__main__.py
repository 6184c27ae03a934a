"""``python -m ckptstore``: the command ``ckpt``, where no script of that name is on the path."""

from __future__ import annotations

from ckptstore.cli.entry import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
