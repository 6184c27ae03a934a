"""A fold's rows: the last one, and the one after it."""

from __future__ import annotations

import pytest

from ckptstore.errors import FormatError
from ckptstore.formats.history import folds
from tests.formats.fold_data import sealed
from tests.formats.test_catalog import CHAIN, RUN, document


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_encoding_names_the_last_segment_or_one_behind_it(beyond: int) -> None:
    found, columns = document(CHAIN)
    rows = found["segments"]["rows"] + len(found["encodings"]["loose"]) // 32
    assert rows > 1
    assert columns["encodings.segment"][0] != rows - 1
    columns["encodings.segment"][0] = rows - 1 + beyond
    text, name = sealed(found, columns)
    if beyond:
        with pytest.raises(FormatError, match=f"segment {rows} is not among the {rows} segments"):
            folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")
    else:
        catalog = folds.decode_fold(text, seq=4, run=RUN, digest16=name, what="fold")
        assert catalog.encodings[1, 1][0].segments == (list(catalog.segments)[-1],)
