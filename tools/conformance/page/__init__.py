"""A reader made from ``formats/SPEC.md`` alone: it imports nothing of ckptstore.

It is the second implementation that tests compare with the first, and an executable for the conformance set (``python
-m tools.conformance.page STORE``). It is written to be read beside the page, not to be fast.
"""
