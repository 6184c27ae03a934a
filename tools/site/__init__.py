"""The documentation as a site and as man pages: ``make docs``.

``assembling`` puts pages together that lie in different folders, ``manuals`` writes the man pages.
"""
