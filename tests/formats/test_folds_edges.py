"""A fold's rows: the last one there is, and the one behind it."""

from __future__ import annotations

import pytest

from ckptstore.formats import folds
from ckptstore.formats.errors import FormatError
from tests.formats.test_catalog import CHAIN, RUN, document, sealed


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_encoding_names_the_last_segment_or_one_behind_it(beyond: int) -> None:
    found = document(CHAIN)
    rows = len(found["segments"]["id"]) // 32 + len(found["encodings"].get("loose", "")) // 32
    assert rows > 1
    found["encodings"]["segment"][0] = rows - 1 + beyond
    text, name = sealed(found)
    if beyond:
        with pytest.raises(FormatError, match="segment"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")
    else:
        assert folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold").encodings
