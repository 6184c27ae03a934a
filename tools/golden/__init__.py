"""Golden files: what this version writes, kept so that every later version reads it.

``python -m tools.golden`` makes those that are missing, the same bytes each time (but for another version of zstd,
which the files name). From the freeze of format 1 on, later versions add files, and change none
(``tests/golden/frozen-1.json`` will have their hashes).

``formats/golden``
    ``segments-1.json`` and segments in both forms; ``codecs-1.json``, every codec; ``steps-1.json``, optimizer steps of
    every rule; ``texts-1.json``, slots, manifests, folds and the other texts, with the features that they may ask for.
``tests/golden``
    ``store-1``, a store with a little of everything, and what comes out of it; ``conformance``, the conformance set.
"""
