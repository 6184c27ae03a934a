"""The mutation gate: take out one fsync, checksum comparison, fence, anchor, pin or bounds check; a test must fail.

``python -m tools.mutants`` (``make mutants``). `sites` finds the places in the syntax tree, `plan` says which tests
concern a module, `trial` runs them on a copy of the tree in which one place was changed. Beside the checks, a seeded
sample of ordinary slips: `ordinary` finds them, `drawing` draws, `equivalents` says which cannot be noticed and why.
"""
