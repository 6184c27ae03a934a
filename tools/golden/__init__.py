"""Golden files: what this version writes, kept so that every later version reads it.

``python -m tools.golden`` makes all of them again, the same bytes each time (but for another version of zstd, which the
files name). Until format 1 is released they follow the format; afterwards later versions add files, and change none.

==========================  ====================================================  =========================================
``formats/golden``          ``segments-1.json``, ``codecs-1.json``,               segments in both forms; every codec; every
                            ``steps-1.json``, ``texts-1.json``                    step; slots, folds and the other texts
``tests/golden``            ``store-1``, and ``store-1.json`` beside it           a store with a little of everything
``tests/golden``            ``conformance``                                       the conformance set
==========================  ====================================================  =========================================
"""
