"""Injects every kind of fault at every request of a store's life in a bucket: `tools.crash.faultsweep --medium s3`.

A fault hits one request, or all requests from there on. Then a healthy client that bypasses the proxy must find every
acknowledged checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ckptstore.backends.object_store.objects import ObjectBackend
from ckptstore.errors import CkptError
from tools.crash.grounds import TIMEOUT
from tools.crash.lives import LIVES
from tools.crash.scenario import Violation, check
from tools.crash.sweep import Sweep
from tools.objects.faults import small_uploads
from tools.objects.proxy import FAULTS, FaultProxy, Rule
from tools.objects.server import Server, options_for

__all__ = ["KINDS", "inject", "operations", "places", "sweep"]

_FOR_EVER: Final = ("reset", "503", "500_after", "403")
KINDS: Final[dict[str, tuple[str, int]]] = {
    **{f"{fault}": (fault, 1) for fault in FAULTS if fault != "slow"},
    **{f"{fault} from here on": (fault, -1) for fault in _FOR_EVER},
}
"""Name -> (fault of the proxy, how many requests in a row). ``403``: the access rights are revoked."""
_UNSEEN: Final = frozenset({"flip_up"})
"""Faults that only a server that compares checksums can reject."""
_SECONDS: Final = {"late": 0.2, "stall": 2 * TIMEOUT}
_TRIES: Final = 4


def rule(kind: str, nth: int) -> Rule:
    """The proxy rule for a kind of fault at the `nth` request (from 1) that this fault can hit."""
    fault, times = KINDS[kind]
    return Rule(fault, times=times, skip=nth - 1, seconds=_SECONDS.get(fault, 0.2))


def operations(server: Server, *, life: str = "whole", parts: bool = False) -> Counter[str]:
    """The requests of a healthy life: operation of the proxy -> count."""
    with FaultProxy(server.port) as proxy:
        _lived(server, proxy, life, [], parts=parts)
        return Counter(one["operation"] for one in proxy.log())


def places(asked: Counter[str], kind: str) -> int:
    """The number of requests of a life that a kind of fault can hit."""
    done_to = FAULTS.get(KINDS[kind][0])
    return sum(count for operation, count in asked.items() if done_to is None or operation in done_to)


def inject(server: Server, *rules: Rule, life: str = "whole", parts: bool = False) -> tuple[str | None, int, int]:
    """Run one life with faults, then let a healthy process check the store.

    Args:
        parts: upload small segments in parts, as large ones are.

    Returns:
        the class of the error that surfaced, or None; how many requests met a fault; checkpoints restored.

    Raises:
        Violation: a promise is broken, or an error surfaced that is not one of ours.
    """
    promised: list[str] = []
    surfaced = None
    with FaultProxy(server.port) as proxy:
        proxy.rules(rules)
        try:
            url = _lived(server, proxy, life, promised, parts=parts)
        except _EndedError as error:
            url, surfaced = error.url, type(error.__cause__).__name__
        hit = sum(proxy.injected().values())
        proxy.rules([])
        proxy.settle()
    return surfaced, hit, check(ObjectBackend(url, server.options), promised)


class _EndedError(Exception):
    def __init__(self, url: str) -> None:
        self.url = url


def _lived(server: Server, proxy: FaultProxy, life: str, promised: list[str], *, parts: bool) -> str:
    """The URL of a store after a life through a proxy."""
    url = server.url()
    options = options_for(proxy.port, read_timeout=TIMEOUT, tries=_TRIES)
    try:
        with small_uploads(4 << 10 if parts else 1 << 30):
            LIVES[life](lambda: ObjectBackend(url, options), promised.append)
    except CkptError as error:
        raise _EndedError(url) from error
    return url


def sweep(
    server: Server,
    every: int = 1,
    *,
    start: int = 0,
    life: str = "whole",
    kinds: Sequence[str] = tuple(KINDS),
    checks: bool = True,
) -> Sweep:
    """Inject every kind of fault at every `every`-th request.

    Args:
        start: which of `every` requests is the first; each kind begins with another one.
        checks: whether the server compares checksums.

    Raises:
        Violation: names the kind and the request.
    """
    injected: Counter[str] = Counter()
    surfaced: Counter[str] = Counter()
    survived = restored = 0
    asked = [operations(server, life=life, parts=parts) for parts in (False, True)]
    for number, kind in enumerate(kind for kind in kinds if checks or KINDS[kind][0] not in _UNSEEN):
        parts = number % 2
        first = 1 + (start + 7 * number) % every
        for nth in range(first, places(asked[parts], kind) + 1, every):
            try:
                error, hit, found = inject(server, rule(kind, nth), life=life, parts=bool(parts))
            except Exception as broken:
                raise Violation(f"{kind} at request {nth}: {broken}") from broken
            injected[kind] += hit
            if error is None:
                survived += 1
            else:
                surfaced[error] += 1
            restored += found
    return Sweep(dict(injected), dict(surfaced), survived, 0, restored)
