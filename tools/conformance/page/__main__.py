"""The reader made from the page, as an executable under test: ``python -m tools.conformance.page STORE``."""

import json
import sys
from pathlib import Path

from tools.conformance.page.codecs import RefusedError
from tools.conformance.page.store import Store

try:
    found = Store(Path(sys.argv[1])).answer()
except RefusedError as error:
    found = {"refused": str(error)}
print(json.dumps(found))
