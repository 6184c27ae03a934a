"""A compiled kernel that gives wrong bytes, or fails, is named and switched off. It is never damage of the store."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import CorruptSegmentError, KernelWarning
from ckptstore.formats import codecs, digest, kernel_choice, optim, uncached_copy
from ckptstore.formats.kernel_choice import Hot
from tests.forms import LONG, in_turn
from tests.maintenance.inside import forget, kernels, replace, trust

pytest.importorskip("ckptstore.formats.core", reason="the kernels are not compiled")
torch = pytest.importorskip("torch")

from ckptstore.training import OptimizerStep  # noqa: E402

_LOADED = (codecs, optim)

_FIRST = {"moments", "move", "buffered", "split", "fma"}
"""Kernels whose result is another argument than the last."""


def _wrong(kernel: Hot[..., Any], how: str) -> Callable[..., Any]:
    """The compiled form with one bit of its result flipped; or one that fails half-way."""
    right = kernel.compiled

    def run(*args: Any) -> Any:
        result = right(*args)
        out = args[1] if kernel.reference.__name__ in _FIRST - {"fma"} else args[-1]
        for part in out if isinstance(out, list) else [out]:
            if isinstance(part, np.ndarray) and part.flags.writeable and part.nbytes:
                part.view(np.uint8)[len(part) // 2] ^= 1
                break
        if how == "raises":
            raise NotImplementedError("no such instruction")
        if isinstance(result, np.ndarray) and len(result):
            result.view(np.uint8)[0] ^= 1
        return result

    return run


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No kernel has been tested yet."""
    forget()
    kernel_choice.use("compiled")
    yield
    kernel_choice.use(None)
    forget()


def _train(root: Path, optimizer: str) -> dict[int, bytes]:
    """Deltas, step diffs and their digests -> the saved states."""
    torch.manual_seed(3)
    saved: dict[int, bytes] = {}
    net = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 20))
    made = (
        torch.optim.AdamW(net.parameters())
        if optimizer == "adam"
        else torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    )
    store = ckptstore.open(root, create=True)
    for options in ({"deltas": ckptstore.DeltaOptions(interval=20)}, {"diffs": ckptstore.DiffOptions(batch=1)}):
        with store.writer(poll_seconds=None, **options) as writer:  # type: ignore[arg-type]
            for _ in range(4):
                net(torch.randn(5, 40)).square().mean().backward()
                made.step()
                state = {
                    "net": net.state_dict(),
                    "optimizer": made.state_dict(),
                    "copy": {name: one.detach().bfloat16() for name, one in net.named_parameters()},
                }
                step = len(saved) + 1
                saved[step] = _bits(state)
                writer.save_async(state, step, updates=OptimizerStep(made) if "diffs" in options else None).result()
                made.zero_grad()
    return saved


def _bits(state: Any) -> bytes:
    if isinstance(state, dict):
        return b"".join(f"{key}:".encode() + _bits(state[key]) for key in sorted(state, key=str))
    if isinstance(state, list | tuple):
        return b"".join(map(_bits, state))
    if isinstance(state, torch.Tensor):
        return state.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if state.numel() else b""
    return repr(state).encode()


Stores = dict[str, tuple[Path, dict[int, bytes]]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    """A store of each optimizer, made by numpy, and its states."""
    kernel_choice.use("numpy")
    found: Stores = {}
    for optimizer in ("adam", "sgd"):
        root = tmp_path_factory.mktemp("kernels") / optimizer
        found[optimizer] = root, _train(root, optimizer)
        kinds = {info.kind for info in ckptstore.open(root).checkpoints()}
        assert {"delta", "gradient"} <= kinds
    return found


def _optimizer(kernel: str) -> str:
    return "sgd" if kernel == "buffered" else "adam"


DECODERS = ["combine", "unpack_small", "put_exceptions", "add_unsorted", "classify", "to_bfloat16"]
DECODERS += ["moments", "move", "fma", "buffered", "block_sums"]
ENCODERS = [*DECODERS, "difference", "zigzag", "rotate_left", "split"]
ENCODERS += ["pack_small", "take_exceptions", "sort", "missed"]


def _told(caught: list[warnings.WarningMessage], name: str) -> bool:
    """Whether the kernel was named, once; False: it was not used."""
    told = [str(one.message) for one in caught if issubclass(one.category, KernelWarning)]
    assert len(told) <= 1, told
    assert all("CKPTSTORE_KERNELS=numpy" in text and name in text for text in told), told
    assert (kernel_choice.kind() == "numpy") == bool(told)
    return bool(told)


_used: set[str] = set()


@pytest.mark.parametrize(
    ("name", "since", "how"),
    in_turn(DECODERS, [("first", "bytes"), ("later", "raises"), ("later", "bytes"), ("first", "raises")], each=2),
)
def test_an_intact_store_is_never_called_damaged(
    pristine: Stores, tmp_path: Path, name: str, since: str, how: str
) -> None:
    root, saved = pristine[_optimizer(name)]
    kernel = kernels()[name]
    works: dict[str, Callable[[Path], object]] = {
        "load": lambda target: [_bits(ckptstore.open(root).load(step)) for step in saved] == list(saved.values()),
        "verify": lambda target: ckptstore.verify(root, deep=True).ok,
        "repair": lambda target: not ckptstore.repair(root, target).lost,
        "export": lambda target: ckptstore.open(root).export(7, target.with_suffix(".safetensors")),
    }
    if since == "later" and not LONG:  # each is done twice
        works = {what: works[what] for what in ("load", "repair")}
    for number, (what, work) in enumerate(works.items()):
        kernel_choice.use("compiled")
        forget()
        if since == "later":
            work(tmp_path / f"before{number}")
            trust()
        replace(kernel, _wrong(kernel, how))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert work(tmp_path / f"target{number}"), what
        if _told(caught, name):
            _used.add(name)


def test_most_of_them_were_used() -> None:
    if _used:
        assert {"combine", "moments", "move", "block_sums"} <= _used, _used


@pytest.mark.parametrize(("name", "how"), in_turn(ENCODERS, ["bytes", "raises"]))
def test_output_of_a_wrong_kernel_becomes_no_checkpoint(tmp_path: Path, name: str, how: str) -> None:
    kernel = kernels()[name]
    replace(kernel, _wrong(kernel, how))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = _train(tmp_path / "store", _optimizer(name))
    _told(caught, name)
    kernel_choice.use("numpy")
    store = ckptstore.open(tmp_path / "store")
    assert [_bits(store.load(step)) for step in saved] == list(saved.values())
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("name", ["combine", "moments"])
def test_damage_stays_damage(pristine: Stores, tmp_path: Path, name: str) -> None:
    """Also beside a wrong kernel: damage that numpy also finds is reported, and nothing else."""
    root = Path(shutil.copytree(pristine["adam"][0], tmp_path / "store"))
    segment = max(root.glob("seg/*/*"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    kernel_choice.use("numpy")
    wanted = ckptstore.verify(root, deep=True)
    assert not wanted.ok
    kernel_choice.use("compiled")
    kernel = kernels()[name]
    replace(kernel, _wrong(kernel, "bytes"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)
        found = ckptstore.verify(root, deep=True)
    assert (found.damage, found.restorable) == (wanted.damage, wanted.restorable)


def test_a_damaged_store_does_not_switch_right_kernels_off(pristine: Stores, tmp_path: Path) -> None:
    root = Path(shutil.copytree(pristine["adam"][0], tmp_path / "store"))
    for segment in root.glob("seg/*/*"):
        data = bytearray(segment.read_bytes())
        data[-40] ^= 1
        segment.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        assert not ckptstore.verify(root, deep=True).ok
        with pytest.raises(CorruptSegmentError):
            ckptstore.open(root).load(7)
    assert kernel_choice.kind() == "compiled"


def test_warnings_that_are_errors_stop_no_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = kernels()["difference"]
    replace(kernel, _wrong(kernel, "bytes"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        saved = _train(tmp_path / "store", "adam")
    assert "KernelWarning" in capsys.readouterr().err or kernel_choice.kind() == "compiled"
    assert _bits(ckptstore.open(tmp_path / "store").load(7)) == saved[7]


@pytest.mark.parametrize("name", ["stream", "moves"])
@pytest.mark.parametrize("how", ["bytes", "raises"])
def test_copies_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    kernel = kernels()[name]
    right = kernel.compiled

    def wrong(*args: Any) -> None:
        if how == "raises":
            raise NotImplementedError("no such instruction")
        if name == "stream":
            right(args[0], args[1])
            args[1][-1] ^= 1
        else:
            right(args[0], args[1], args[2] - 1, args[3])

    replace(kernel, wrong)
    monkeypatch.setattr(uncached_copy, "_checked", False)
    source, out = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    with pytest.warns(KernelWarning, match="CKPTSTORE_KERNELS=numpy"):
        uncached_copy.copy(source, out)
    assert kernel_choice.kind() == "numpy"
    assert np.array_equal(out, source)


def test_a_digest_is_asked_for_again() -> None:
    """A kernel that fails after it was right for long: the caller does not notice."""
    data = np.arange(4000, dtype=np.uint8)
    wanted = digest.digest(data)
    digest.digest(data)
    kernel = kernels()["block_sums"]
    replace(kernel, _wrong(kernel, "raises"))
    with pytest.warns(KernelWarning, match="block_sums"):
        assert digest.digest(data) == wanted
