"""An explicit-state model of the commit protocol (``formats/SPEC.md``, sections 7 to 10), with mutants that it must
catch.

Run it: ``python -m tools.protocol.model``, or with ``--quick`` in under a minute.
"""
