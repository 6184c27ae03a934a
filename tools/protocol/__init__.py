"""An explicit-state model of the commit protocol (the design page's rules), with mutants that it must catch.

Run it: ``python -m tools.protocol.model``, or with ``--quick`` in under a minute.
"""
