"""Compares a checkpoint's state with the objects of a script, then restores all of it or nothing.

`Comparison` compares and changes nothing. `Comparison.restore` restores every object. If one of them raises, the
objects before it get their old state back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ckptstore.errors import FormatError, StateMismatchError, UsageError
from ckptstore.training import rng
from ckptstore.training.loaders.loader_plans import is_stateful
from ckptstore.training.parameter_names import bare_state
from ckptstore.training.resume import schedules
from ckptstore.training.resume.module_fit import ModuleFit, otherwise_trained
from ckptstore.training.resume.optimizer_fit import OptimizerFit
from ckptstore.training.resume.part_fit import Fit, PartFit, Undo, some
from ckptstore.training.script_objects import ScriptObjects, placed

__all__ = ["FORMAT", "PARTS", "Comparison", "check_format", "check_parts"]

FORMAT: Final = 1
PARTS: Final = ("model", "optimizer", "scheduler", "scaler", "compressor", "extra", "loader", "random")
"""The parts of a state, in the order of their restoration."""
_LISTED: Final = 20
"""How many differences a message lists; the error has all of them."""


def check_format(state: Any) -> None:
    """Raise `FormatError` for a state that no `Checkpointer` made."""
    if not isinstance(state, dict) or state.get("format") != FORMAT or "random" not in state:
        raise FormatError(
            "the checkpoint was not made by a Checkpointer: load it with Store.load, and give its parts to the "
            "objects that they belong to"
        )


def check_parts(parts: str | Sequence[str] | None, given: ScriptObjects) -> frozenset[str]:
    """The parts to restore.

    Raises:
        UsageError: an unknown part, or one that was not passed to the Checkpointer.
    """
    if parts is None:
        return frozenset(PARTS)
    asked = [parts] if isinstance(parts, str) else list(parts)
    if not asked or not all(isinstance(one, str) for one in asked):
        raise UsageError(f"parts={parts!r}: name one or more of {', '.join(PARTS)}")
    for one in asked:
        if one not in PARTS:
            raise UsageError(f"parts: {one!r} is none of {', '.join(PARTS)}")
        if not given.has(one):
            raise UsageError(f"parts: {one!r} is to be restored, and the Checkpointer was not given it")
    return frozenset(asked)


class Comparison:
    """Which parts of a checkpoint fit a script's objects, and which do not. Comparing changes nothing.

    Attributes:
        fits: each object with its part of the state, in the order of their restoration.
        differences: what does not fit; each names a path.
        notes: settings that the checkpoint overrides, for the log.
        left: the parts that were left out on request, for the log; empty: none.
        warnings: why the run will differ from the one that was saved.
    """

    def __init__(self, given: ScriptObjects, state: Any, wanted: Collection[str], *, whole: bool = True) -> None:
        """Compare.

        Args:
            state: the checkpoint's. A `TensorEntry` may stand for a tensor.
            wanted: the parts to restore.
            whole: all parts were requested: also say what else the checkpoint holds.

        Raises:
            FormatError: no `Checkpointer` made the state.
        """
        check_format(state)
        self.fits: list[Fit] = []
        self.differences: list[str] = []
        self.notes: list[str] = []
        self.left = ""
        self.warnings: list[str] = []
        self._given = given
        self._state: Mapping[str, Any] = state
        about = state.get("script")
        self._about: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
        self._random = "random" in wanted
        self._whole = whole
        compare = {
            "model": self._models,
            "optimizer": self._optimizers,
            "scheduler": self._schedulers,
            "scaler": self._scaler,
            "compressor": self._compressor,
            "extra": self._extras,
            "loader": self._loader,
        }
        for part, of_it in compare.items():
            if part not in wanted or not given.has(part):
                continue
            if part in state:
                of_it(state[part])
            else:
                self.differences.append(
                    f"the checkpoint holds no {part}: it was saved by a Checkpointer that was given none. Without "
                    f"{part}= the others are restored"
                )
        self._remark_rest(wanted, whole)
        for fit in self.fits:
            self.differences += fit.differences
        self._remark_casts()

    @property
    def step(self) -> int:
        """The step of the state."""
        step: int = self._state["step"]
        return step

    def check(self, ref: str) -> None:
        """Refuse a state if a part of it does not fit.

        Raises:
            StateMismatchError: with every difference.
        """
        if self.differences:
            raise StateMismatchError(_refused(self.differences, ref), self.differences)

    def restore(self, *, read_in_place: bool = False) -> None:
        """Restore what fits of every object.

        Generators come last, so that numbers which other objects draw while they load do not count.

        Args:
            read_in_place: the models' tensors have been read already and cannot be undone.

        Raises:
            what an object's own ``load_state_dict`` raises, with a note that says what was undone.
        """
        undos: list[tuple[str, Undo | None]] = []
        generators = rng.global_states()
        at = "random"
        try:
            for number, fit in enumerate(self.fits):
                at = fit.path
                # Prevents: a copy of every model, even if no later object can raise.
                risky = any(one.foreign for one in self.fits[number:])
                kept = risky and not (read_in_place and isinstance(fit, ModuleFit))
                undos.append((fit.path, fit.remember() if kept else None))
                fit.put()
            at = "random"
            if self._random:
                rng.restore(self._state["random"])
        except BaseException as error:
            left = _put_back(undos)
            with contextlib.suppress(Exception):
                rng.restore(generators)
            error.add_note(
                f"restoring {at} failed; the script's other objects are as they were before"
                + (f", except {some(left)}, which could not be put back" if left else "")
                + '. resume(parts=["model"]) restores only those parts'
            )
            raise

    # -- the parts

    def _each(self, part: str, state: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        """For each object of a part: path, object, its state, its description."""
        mine, about = self._given.of(part), self._about.get(part)
        if isinstance(mine, dict):
            there = set(state) if isinstance(state, dict) else set()
            fits = isinstance(state, dict) and there == set(mine)
        elif isinstance(mine, list):
            there = set(range(len(state))) if isinstance(state, list | tuple) else set()
            fits = len(there) == len(mine) and isinstance(state, list | tuple)
        else:
            yield part, mine, state, about
            return
        if not fits:
            had = sorted(mine) if isinstance(mine, dict) else len(mine)
            self.differences.append(f"{part}: {had} are to be restored, the checkpoint has {_said(state)}")
        for key, one in mine.items() if isinstance(mine, dict) else enumerate(mine):
            if key in there:
                yield f"{part}.{key}", one, state[key], _member(about, key)

    def _models(self, state: Any) -> None:
        left_out = {f"model{place}": record for place, record in placed(self._about.get("left_out"))}
        for path, module, its, about in self._each("model", state):
            self._module(path, module, its, about, left_out.get(path))

    def _module(self, path: str, module: torch.nn.Module, state: Any, about: Any, left_out: Any = None) -> None:
        self.fits.append(ModuleFit(path, module, state, left_out))
        if self._whole:  # with parts= the run is another one anyway
            self.warnings += otherwise_trained(path, module, about, state)

    def _optimizers(self, state: Any) -> None:
        weights = self._weights()
        paths = self._given.paths()
        for path, optimizer, its, about in self._each("optimizer", state):
            self.fits.append(OptimizerFit(path, optimizer, its, about, paths, weights))

    def _schedulers(self, state: Any) -> None:
        for path, scheduler, its, about in self._each("scheduler", state):
            self._schedule(path, scheduler, its, about)

    def _schedule(self, path: str, scheduler: Any, state: Any, about: Any) -> None:
        refused = schedules.refusal(path, scheduler, state, about)
        if not refused:
            state, about = self._by_group(scheduler, state, about)
            self.notes += schedules.otherwise(path, scheduler, state, about)
        self._member(path, state, scheduler, refused)

    def _by_group(self, scheduler: Any, state: Any, about: Any) -> tuple[Any, Any]:
        """A schedule's state, in the order of the parameter groups of the script's optimizer."""
        optimizer = schedules.optimizer_of(scheduler)
        for fit in self.fits:
            if isinstance(fit, OptimizerFit) and optimizer in (
                fit.optimizer,
                getattr(fit.optimizer, "optimizer", None),
            ):
                groups = fit.groups
                if groups is not None:
                    return schedules.arranged(scheduler, state, about, groups, len(fit.state["param_groups"]))
        return state, about

    def _scaler(self, state: Any) -> None:
        scaler: Any = self._given.scaler
        if bool(state) != bool(scaler.state_dict()):
            was, now = ("enabled", "disabled") if state else ("disabled", "enabled")
            self.warnings.append(f"scaler: {was} in the checkpoint, {now} in the script, which begins with its own")
        elif state:
            self._member("scaler", state, scaler)

    def _compressor(self, state: Any) -> None:
        compressor = self._given.compressor
        self.fits.append(PartFit("compressor", state, compressor.state_dict, compressor.load_state_dict))

    def _loader(self, state: Any) -> None:
        loader: Any = self._given.loader
        differences: list[str] = []
        try:
            loader.compare(state)  # the loader itself reports changes when it continues
        except FormatError as error:
            differences.append(f"loader: {error}")
        # It comes last. Its state is not read before, because that may start its workers.
        foreign = is_stateful(loader.loader)
        self.fits.append(
            PartFit("loader", state, None, loader.load_state_dict, differences=differences, foreign=foreign)
        )

    def _extras(self, state: Any) -> None:
        objects = self._given.extra_objects
        # Optimizers first: schedules follow the order of their groups.
        for name in sorted(self._given.extra, key=lambda name: not isinstance(objects[name], torch.optim.Optimizer)):
            get, put = self._given.extra[name]
            path, value = f"extra[{name!r}]", objects[name]
            if not isinstance(state, Mapping) or name not in state:
                self.differences.append(
                    f"the checkpoint holds no extra[{name!r}]: it was saved by a Checkpointer that was not given it"
                )
            elif isinstance(value, torch.nn.Module):
                self._module(path, value, state[name], _member(self._about.get("extra"), name))
            elif isinstance(value, torch.optim.Optimizer):
                about = _member(self._about.get("extra"), name)
                self.fits.append(
                    OptimizerFit(path, value, state[name], about, self._given.paths(), self._weights(), part="extra")
                )
            elif schedules.is_schedule(value):
                self._schedule(path, value, state[name], _member(self._about.get("extra"), name))
            else:
                self.fits.append(PartFit(path, state[name], get, put))

    def _member(self, path: str, state: Any, value: Any, differences: Sequence[str] = ()) -> None:
        foreign = not type(value).__module__.startswith("torch.")
        self.fits.append(
            PartFit(path, state, value.state_dict, value.load_state_dict, differences=differences, foreign=foreign)
        )

    def _weights(self) -> dict[str, Any]:
        """The checkpoint's tensors of modules, by path."""
        found: dict[str, Any] = {}
        saved = self._state.get("model")
        states = [(f"model{place}", one) for place, one in placed(saved if self._given.several("model") else [saved])]
        if not self._given.several("model"):
            states = [("model", saved)]
        extra = self._state.get("extra")
        for name, value in self._given.extra_objects.items():
            if isinstance(value, torch.nn.Module) and isinstance(extra, Mapping):
                states.append((f"extra.{name}", extra.get(name)))
        for place, state in states:
            if isinstance(state, Mapping):
                found |= {f"{place}.{name}": one for name, one in bare_state(state).items()}
        return found

    # -- notes and warnings

    def _remark_rest(self, wanted: Collection[str], whole: bool) -> None:
        state, given = self._state, self._given
        if not whole:
            rest = [one for one in PARTS if one not in wanted and (given.has(one) or one == "random") and one in state]
            if rest:
                named = ", ".join("random generators" if one == "random" else one for one in rest)
                restored = ", ".join(one for one in PARTS if one in wanted)
                self.left = f"restored: {restored}; left as the script has them: {named}"
            return
        left = [one for one in PARTS if one != "random" and not given.has(one) and state.get(one)]
        if given.has("extra"):
            left += [f"extra[{name!r}]" for name in state.get("extra") or () if name not in given.extra]
        if left:
            self.warnings.append(
                f"the checkpoint also holds {', '.join(left)}, which this Checkpointer was not given and does not "
                "restore: the run will not be the one that was saved"
            )

    def _remark_casts(self) -> None:
        kinds: dict[tuple[str, str, str], list[str]] = {}
        for fit in self.fits:
            for path, before, after in fit.casts:
                what = "tensors of the optimizer" if fit.part == "optimizer" else f"tensors of the {fit.part}"
                kinds.setdefault((what, _dtype(before), _dtype(after)), []).append(path)
        if kinds:
            said = "; ".join(
                f"{len(paths)} {what} from {before} to {after} ({some(paths, 2)})"
                for (what, before, after), paths in kinds.items()
            )
            self.warnings.append(f"tensors of the script have another dtype than the checkpoint's. Cast: {said}")


def _refused(differences: Sequence[str], ref: str) -> str:
    """The message: why a checkpoint is not restored, and how to restore a part of it."""
    listed = "".join(f"\n  {one}" for one in differences[:_LISTED])
    more = len(differences) - _LISTED
    rest = f"\n  and {more} more, in the error's .differences" if more > 0 else ""
    count = f"{len(differences)} difference{'' if len(differences) == 1 else 's'}"
    return (
        f"checkpoint {ref} does not fit the script ({count}), and nothing was restored:{listed}{rest}\n"
        'resume(parts=["model"]) restores only the named parts, resume(strict=False) everything that fits; both say '
        "what they leave out"
    )


def _put_back(undos: Sequence[tuple[str, Undo | None]]) -> list[str]:
    """Undo, the last one first -> the paths that could not be undone."""
    left = []
    for path, undo in reversed(undos):
        if undo is None:
            left.append(path)
            continue
        try:
            undo()
        except Exception:  # noqa: BLE001  # the others are undone all the same
            left.append(path)
    return left[::-1]


def _member(about: Any, key: Any) -> Any:
    if isinstance(about, Mapping):
        return about.get(key)
    return about[key] if isinstance(about, list | tuple) and isinstance(key, int) and key < len(about) else None


def _said(state: Any) -> str:
    """What a checkpoint has instead of the expected list or dict."""
    if isinstance(state, dict):
        return str(sorted(state))
    return f"{len(state)} of them, by number" if isinstance(state, Sequence) else type(state).__name__


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
