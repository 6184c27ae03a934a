"""The conformance set: whole stores and their expected contents, for readers in any language.

``tests/golden/conformance`` holds the stores and ``conformance-1.json``::

    {"stores": {NAME: {"about": text, "expected": ANSWER}, ...}}

An executable under test is given the path of one store and prints its ANSWER, a JSON object, on standard output::

    {"refused": text}                                 the store must not be read (an unknown feature, a wide gap)
    {"latest": "STEP@TERM" | null | {"error": text},
     "checkpoints": {"STEP@TERM": CHECKPOINT, ...},   every promised checkpoint
     "tags": {NAME: "STEP@TERM" | null | {"error": text}, ...}}   if there are any: what tag:NAME names
    CHECKPOINT = {"error": text}                      it cannot be restored
               | {"state": state hash, "lossy": boolean, "tree": the tree of SPEC.md 3.1,
                  "tensors": {name: {"dtype": logical, "shape": [...], "hash": XXH3-128 of its image}, ...},
                  "unranked": of a tree with $ranks, the union that no rank reads (3.3), as canonical text,
                  "metadata": of a checkpoint that has any, as they are stored}

Texts are not compared. The exit status is 0 with every answer, also a refusal; another one is a failure.

``python -m tools.conformance COMMAND ...`` runs ``COMMAND ... STORE`` for every store; two such commands are here:
``python -m tools.conformance.ours`` and ``python -m tools.conformance.page``, a reader made from ``formats/SPEC.md``
alone.
"""
