"""The experiments of the four papers as commands: ``python -m tools.papers NAME|all [--quick] [--json] [--out DIR]``.

Each experiment is a module with one function, ``run(asked) -> Result`` (`tools.papers.result`), and a row of
`tools.papers.registry`. The command writes for each a JSON file with every number, a PNG of its figure, and prints its
table with the paper's figures beside ours; `tools.papers.page` makes ``docs/papers.md`` of the JSON files.

An experiment measures on small models that really train, on this machine's CPU. Every one compares what it restored
with what was trained, bit by bit; a baseline that loses something says how much. A claim that does not hold here says
why.
"""
