"""The mutation gate: remove one fsync, checksum comparison, fence, anchor, pin or bounds check; a test must fail.

``python -m tools.mutants`` (``make mutants``). `sites` finds the places in the syntax tree, `plan` selects the tests of
a module, `trial` runs them on a copy of the tree in which one place was changed. Beside the checks there is a seeded
sample of ordinary mutants: `ordinary` finds them, `drawing` draws, `equivalents` lists those that no test can notice,
with the reasons.
"""
