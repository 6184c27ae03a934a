"""``python -m tools.papers``: the command (`tools.papers.command`)."""

from tools.papers.command import main

main()
