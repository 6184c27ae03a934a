"""The documentation as a site and as man pages: ``make docs``.

``assembling`` collects pages from different folders, ``manuals`` writes the man pages.
"""
