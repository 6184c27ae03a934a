"""Compares a script's schedule with the one of a checkpoint: its class, its arguments, its functions.

A schedule's ``load_state_dict`` replaces the script's numbers with the checkpoint's. Its state has no functions: they
stay the script's.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch

__all__ = ["arranged", "described", "is_schedule", "optimizer_of", "otherwise", "refusal"]

_PROGRESS: Final = frozenset(
    {"last_epoch", "num_bad_epochs", "best", "cooldown_counter", "T_cur", "T_i", "base_lrs", "n_averages", "verbose"}
)
"""Members that hold a schedule's progress, and rates that the optimizer's groups hold, too."""
_BY_GROUP: Final = (
    "_last_lr",
    "base_lrs",
    "base_momentums",
    "initial_lrs",
    "lr_lambdas",
    "max_lrs",
    "max_momentums",
    "min_lrs",
)
"""Members with a value for each of the optimizer's groups."""
_PRIVATE: Final = frozenset({"_milestones", "_anneal_func_type", "_anneal_strategy", "_schedule_phases"})
"""Private members of torch's schedules that are the only place of a script's arguments."""
_PRIVATE_FUNCTION: Final = "_scale_fn_custom"
"""The member of `CyclicLR` that holds a script's function."""
_CHOSEN_BY_NAME: Final = "anneal_func"
"""A torch function that `_anneal_strategy` determines, which is restored."""
_MOST: Final = 16
_LONGEST: Final = 256
_VERSION: Final = f"python{sys.version_info[0]}.{sys.version_info[1]}"
"""Constants of functions are compared only within one Python version: the compiler decides what is a constant."""


def described(schedule: Any) -> dict[str, Any]:
    """What a checkpoint records of a schedule besides its state: class, functions, and the same of inner schedules."""
    schedule = _inner(schedule)
    found: dict[str, Any] = {"class": type(schedule).__qualname__}
    if functions := [_function(one) for one in _functions(schedule)]:
        found["functions"] = functions
    if parts := _parts(schedule):
        found["schedules"] = [described(one) for one in parts]
    return found


def refusal(path: str, schedule: Any, state: Any, about: Any) -> list[str]:
    """Why a checkpoint's state is not one of this schedule; empty: it may be.

    Args:
        about: what `described` said of it; None: it is an old checkpoint.
    """
    schedule = _inner(schedule)
    mine = type(schedule).__qualname__
    if isinstance(about, Mapping):
        if about.get("class") != mine:
            return [f"{path}: {about.get('class')} in the checkpoint, {mine} in the script"]
        parts, theirs = _parts(schedule), about.get("schedules") or []
        if len(parts) != len(theirs):
            return [f"{path}: {len(theirs)} schedules in the checkpoint's {mine}, {len(parts)} in the script's"]
        return [
            said
            for number, (part, its) in enumerate(zip(parts, theirs, strict=True))
            for said in refusal(f"{path}[{number}]", part, None, its)
        ]
    if isinstance(state, Mapping):
        lacking = sorted(name for name in _arguments(schedule) if name in _live(schedule) and name not in state)
        if lacking:
            return [f"{path}: the checkpoint's has no {lacking[0]}: it is of another class than {mine}"]
    return []


def arranged(schedule: Any, state: Any, about: Any, groups: Sequence[int | None], there: int) -> tuple[Any, Any]:
    """A checkpoint's state and record of a schedule, with each group's values at the script's place of that group.

    Args:
        groups: for each of the script's groups its number in the checkpoint; None: it has no single counterpart, and
            keeps the script's values.
        there: the number of groups in the checkpoint.
    """
    schedule = _inner(schedule)
    live = _live(schedule)
    if isinstance(state, Mapping):
        state = dict(state)
        for name in _BY_GROUP:
            mine: Any = [None] * len(groups) if name == "lr_lambdas" else live.get(name)
            if name in live and _is_of(state.get(name), there) and _is_of(mine, len(groups)):
                # Prevents: the rate of one group for another, if the script makes its groups in another order.
                state[name] = [mine[at] if its is None else state[name][its] for at, its in enumerate(groups)]
    functions: Any = about.get("functions") if isinstance(about, Mapping) else None
    if _is_of(functions, there) and _is_of(live.get("lr_lambdas"), len(groups)):
        own = [_function(one) for one in _functions(schedule)]
        if len(own) == len(groups):
            its = [own[at] if number is None else functions[number] for at, number in enumerate(groups)]
            about = {**about, "functions": its}
    states = state.get("_schedulers") if isinstance(state, Mapping) else None
    abouts = about.get("schedules") if isinstance(about, Mapping) else None
    parts = [
        arranged(part, _at(states, number), _at(abouts, number), groups, there)
        for number, part in enumerate(_parts(schedule))
    ]
    if _is_of(states, len(parts)):
        state = {**state, "_schedulers": [each for each, _ in parts]}
    if _is_of(abouts, len(parts)):
        about = {**about, "schedules": [each for _, each in parts]}
    return state, about


def optimizer_of(schedule: Any) -> Any:
    """The optimizer whose rates it sets; None: unknown."""
    return getattr(_inner(schedule), "optimizer", None)


def otherwise(path: str, schedule: Any, state: Any, about: Any) -> list[str]:
    """Arguments of the script's schedule that the checkpoint's override, as sentences. Call it before loading."""
    schedule = _inner(schedule)
    live = _live(schedule)
    found = [
        f"{path}: {name.lstrip('_')} is {_said(state[name])}, as in the checkpoint, not {_said(live[name])} as in the "
        "script"
        for name in _settings(schedule, live)
        if isinstance(state, Mapping) and name in state and not _equal(state[name], live[name])
    ]
    if found:
        found.append("to have the script's, set it on the scheduler after resume()")
    if isinstance(about, Mapping):
        theirs = about.get("functions") or []
        loaded = state.get("lr_lambdas", [state.get(_PRIVATE_FUNCTION)]) if isinstance(state, Mapping) else None
        found += _other_functions(path, [_function(one) for one in _functions(schedule)], theirs, loaded)
    states = state.get("_schedulers") if isinstance(state, Mapping) else None
    abouts = about.get("schedules") if isinstance(about, Mapping) else None
    for number, part in enumerate(_parts(schedule)):
        its, its_about = _at(states, number), _at(abouts, number)
        found += otherwise(f"{path}[{number}]", part, its, its_about)
    return found


def is_schedule(value: Any) -> bool:
    """Whether it is a torch schedule or a wrapper of one."""
    return isinstance(_inner(value), torch.optim.lr_scheduler.LRScheduler)


def _inner(schedule: Any) -> Any:
    """The schedule inside a wrapper (Accelerate's) that passes its state on."""
    inner = getattr(schedule, "scheduler", None)
    return inner if isinstance(inner, torch.optim.lr_scheduler.LRScheduler) else schedule


def _at(values: Any, number: int) -> Any:
    return values[number] if isinstance(values, list | tuple) and number < len(values) else None


def _is_of(values: Any, length: int) -> bool:
    return isinstance(values, list | tuple) and len(values) == length


def _live(schedule: Any) -> Mapping[str, Any]:
    return vars(schedule) if hasattr(schedule, "__dict__") else {}


def _parts(schedule: Any) -> list[Any]:
    found = getattr(schedule, "_schedulers", None)
    return list(found) if isinstance(found, list | tuple) else []


def _arguments(schedule: Any) -> set[str]:
    """The names of its class's arguments."""
    try:
        return set(inspect.signature(type(schedule).__init__).parameters) - _PROGRESS - {"self", "optimizer"}
    except (TypeError, ValueError):
        return set()


def _settings(schedule: Any, live: Mapping[str, Any]) -> Iterator[str]:
    """The names of members that the script chose; for classes outside torch: the class's arguments."""
    ours = type(schedule).__module__.startswith("torch.")
    arguments = _arguments(schedule)
    for name, value in live.items():
        public = not name.startswith("_") or name in _PRIVATE
        if public and name not in _PROGRESS and (ours or name in arguments) and _is_plain(value):
            yield name


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, int | float | str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return dict(one) == dict(other)
    return bool(one == other)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):  # a Counter of milestones
        return repr(sorted(value))
    if isinstance(value, list) and value and all(isinstance(one, Mapping) and "end_step" in one for one in value):
        return f"{[one['end_step'] for one in value]!r:.80}"  # phases: the steps at which they end
    return f"{value!r:.80}"


def _functions(schedule: Any) -> list[Any]:
    """The functions that the script passed to it."""
    found: list[Any] = []
    for name, value in _live(schedule).items():
        public = not name.startswith("_") or name == _PRIVATE_FUNCTION
        if public and name not in ("optimizer", "step", _CHOSEN_BY_NAME):
            found += [one for one in (value if isinstance(value, list | tuple) else [value]) if _is_function(one)]
    return found[:_MOST]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _function(function: Any) -> dict[str, Any]:
    """A function's name and its numbers: bound arguments, variables that it uses, constants."""
    if isinstance(function, functools.partial):
        inner = _function(function.func)
        bound = {**{str(number): one for number, one in enumerate(function.args)}, **function.keywords}
        return {**inner, "numbers": {**inner.get("numbers", {}), **_numbers(bound)}}
    if not isinstance(function, FunctionType):
        numbers = _numbers(vars(function)) if hasattr(function, "__dict__") else {}
        return {"name": type(function).__qualname__, "numbers": numbers}
    code = function.__code__
    used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    closed = {name: _cell(cell) for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    constants = [one for one in code.co_consts if isinstance(one, int | float) and not isinstance(one, bool)]
    return {
        "name": function.__qualname__,
        "numbers": _numbers({**used, **closed, **given}),
        "constants": {_VERSION: constants[:_MOST]},
    }


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        str(name): value
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _LONGEST)
    }
    return dict(sorted(found.items())[:_MOST])


def _other_functions(path: str, mine: list[dict[str, Any]], theirs: list[Any], loaded: Any) -> list[str]:
    """
    Args:
        loaded: what the checkpoint has of the members of each, if they are objects: these are restored.
    """
    found = []
    if len(mine) != len(theirs):
        found.append(f"{path}: {len(mine)} functions, as in the script; the checkpoint's run had {len(theirs)}")
    for number, (own, its) in enumerate(zip(mine, theirs, strict=False)):
        where = f"{path}: function {number} ({own['name']})"
        if own["name"] != its.get("name"):
            found.append(f"{where} is the script's; the checkpoint's run had {its.get('name')}")
            continue
        before, now = its.get("numbers") or {}, own.get("numbers") or {}
        restored = _at(loaded, number) or {}
        for name in sorted(before.keys() | now.keys()):
            was, has = before.get(name), now.get(name)
            if was == has:
                continue
            if name in restored:
                found.append(f"{where}: {name} is {was!r}, as in the checkpoint, not {has!r} as in the script")
            else:
                found.append(f"{where}: {name} is {has!r}, as in the script; the checkpoint's run had {was!r}")
        was, has = (_at_version(one) for one in (its, own))
        if was is not None and was != has:
            found.append(f"{where}: its constants are {has}, as in the script; the checkpoint's run had {was}")
    return found


def _at_version(described: Mapping[str, Any]) -> Any:
    return (described.get("constants") or {}).get(_VERSION)
