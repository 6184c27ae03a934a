"""Golden files: files of this version, kept so that every later version reads them.

``python -m tools.golden`` makes the missing ones, with the same bytes each time (except for another version of zstd,
which the files name). Format 1 is frozen: later versions add files, and change none (``tests/golden/frozen-1.json``
has their hashes). So a new codec or rule gets a set of files of its own: `golden_set`.

``formats/golden``
    ``segments-1.json`` and segments in both forms; ``codecs-1.json``, every codec; ``steps-1.json``, optimizer steps of
    every rule; ``texts-1.json``, slots, manifests, folds and the other texts, with the features that they may require;
    ``objects-1.json``, objects of a state's tree.
``tests/golden``
    ``store-1``, a store with a little of everything, and its expected contents; ``conformance``, the conformance set.
"""
