"""The errors of a `Store` that is copied to where it cannot work, and of training without torch."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptstore


def test_a_store_says_how_another_process_gets_one(tmp_path: Path) -> None:
    store = ckptstore.open(tmp_path / "run")
    for how in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ckptstore.UsageError, match=r"cannot be pickled or copied.*ckptstore\.open\(URL\)"):
            how(store)


def test_training_without_torch_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "import ckptstore\n"
        "try:\n"
        "    from ckptstore.training import Checkpointer\n"
        "except ckptstore.MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Checkpointer needs torch: pip install torch (or 'ckptstore[torch]')\n"


def test_bytes_in_extra_state_say_what_to_do(tmp_path: Path) -> None:
    """As in the FAQ: a refused state is saved, and loaded, by two hooks."""
    text = (Path(__file__).parents[2] / "docs" / "faq.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  # the page's own example

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.loaded: Any = None

        def get_extra_state(self) -> io.BytesIO:
            return io.BytesIO(b"scales")

        def set_extra_state(self, state: Any) -> None:
            if not isinstance(state, io.BytesIO):
                raise RuntimeError("Unsupported checkpoint format.")  # the error of TransformerEngine
            self.loaded = state.read()

    model = torch.nn.Sequential(Scaled())
    store = ckptstore.open(tmp_path / "run")
    with store.writer(poll_seconds=None) as writer:
        with pytest.raises(ckptstore.UnsupportedStateError, match=r"_extra_state.*getvalue\(\) of it.*docs/faq\.md"):
            writer.save({"model": model.state_dict()}, 1)
        model.register_state_dict_post_hook(names["to_bytes"])
        model.register_load_state_dict_pre_hook(names["from_bytes"])
        writer.save({"model": model.state_dict()}, 1)
    model.load_state_dict(store.load(1)["model"])
    assert model[0].loaded == b"scales"
