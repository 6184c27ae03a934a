"""A reader made from ``formats/SPEC.md`` alone: nothing of ckptstore is imported here.

It is the second implementation that tests compare with the first, and an executable for the conformance set
(``python -m tools.conformance.page STORE``). It is written to be read beside the page, not to be fast.
"""
