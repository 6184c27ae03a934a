"""Translate obstore's errors to the project's, without text that came from a server or a header.

obstore's texts quote the server's answer, and an answer may quote an access key, a signature or anything else. So our
errors report only the status and the code of an answer, and no error has an obstore error as its cause.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import Final

from obstore import exceptions

from ckptstore.backends.system_errors import ON_THE_WAY
from ckptstore.errors import (
    CkptError,
    ForeignObjectError,
    KeyExistsError,
    KeyNotFoundError,
    ReadOnlyError,
    StorageError,
    StoreNotFoundError,
    UnsupportedBackendError,
)

__all__ = ["RAISED", "Failure", "understood"]

RAISED: Final = (exceptions.BaseError, OSError, ValueError)
"""Errors that obstore raises."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,48})</Code>")
_KIND: Final = re.compile(r"kind: (Timeout|Connect|Interrupted|Decode|Request)\b")
_BROKEN_LIST: Final = "Got invalid list response"
"""obstore's text for a listing that is not XML: one that was cut short and has a matching length."""
_NO_RANGE: Final = 'CONTENT_RANGE header: "bytes 0--1/0'
"""azurite's answer to a range request for an empty object; other servers answer 416."""
_SERVER_BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_DAMAGED: Final = frozenset(
    {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody"}
)
"""Server codes for a request body that arrived damaged."""
_TOLD: Final = {
    "Timeout": "no answer in time",
    "Connect": "cannot connect",
    "Interrupted": "the connection broke",
    "Decode": "the answer broke off",
    "Request": "the connection broke",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    Attributes:
        what: the reason, for people.
        status: the server's status; 0: there was no answer.
        code: the server's error code, if any.
        absent, exists: whether the answer says that the key is absent or exists.
        kind: kind of failure without an answer.
    """

    what: str
    status: int = 0
    code: str = ""
    absent: bool = False
    exists: bool = False
    kind: str = ""

    @property
    def passing(self) -> bool:
        """Whether it is worth repeating the request."""
        return self.kind in _TOLD or self.status in _SERVER_BUSY or self.code in _DAMAGED

    @property
    def undone(self) -> bool:
        """Whether the request certainly had no effect and never will."""
        return self.kind == "Connect" or (400 <= self.status < 500 and self.status not in (408, 409, 412, 425, 429))

    def error(self, name: str, more: str = "", *, writing: bool) -> CkptError:
        """The project's error for the object or listing `name` (which contains the store's URL).

        `more` says where the request was sent and how often.
        """
        if self.code == "NoSuchBucket":
            return StoreNotFoundError.at(name.partition(": ")[0], ": there is no such bucket", "no bucket")
        if self.absent:
            return KeyNotFoundError(f"{name} does not exist")
        if self.exists:
            return KeyExistsError(errno.EEXIST, "the object exists already", name)
        if self.kind == "Path":
            return ForeignObjectError(f"{name}: {self.what}")
        told = f"cannot {'write' if writing else 'read'}: {self.what}{more}"
        if self.status in (401, 403):
            kind: type[StorageError] = ReadOnlyError if writing else StorageError
            found = kind(errno.EACCES, told, name)
        elif self.status == 501:
            found = UnsupportedBackendError(errno.EOPNOTSUPP, told, name)
        else:
            found = StorageError(errno.ETIMEDOUT if self.kind == "Timeout" else ON_THE_WAY, told, name)
        found.unsent = self.undone
        return found


def understood(error: BaseException) -> Failure:
    """Classify an error of obstore."""
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _CODE.search(text)) else ""
    if isinstance(error, FileNotFoundError):
        return Failure("not found", status, code, absent=True)
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return Failure("it exists already", status, code, exists=True)
    if isinstance(error, exceptions.InvalidPathError):
        named = text.partition("\n")[0][:200]
        remedy = "this folder cannot be listed while it exists: delete it with the tools of the bucket"
        return Failure(f"a name that no store gives, {named!a}; {remedy}", kind="Path")
    if status:
        hint = _hint(status, code)
        return Failure(f"the server said {status}{f' {code}' if code else ''}{hint}", status, code)
    if _BROKEN_LIST in text:
        return Failure(_TOLD["Decode"], kind="Decode")
    if _NO_RANGE in text:
        return Failure("no such range", 416)
    if found := _KIND.search(text):
        return Failure(_TOLD[found[1]], kind=found[1])
    # No answer from a server: obstore's own words (a missing region or credentials), in one line.
    return Failure(_own_words(text))


def _own_words(text: str) -> str:
    line = text.partition("\n")[0].partition("<")[0]
    line = re.sub(r"https?://\S+", "the server", line)
    return ascii(line[:200]).strip("'\"")


def _hint(status: int, code: str) -> str:
    if status == 301 or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return " (the bucket is in another region: client_kwargs={'region_name': ...}, or AWS_REGION)"
    if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId"):
        return " (key and secret do not match)"
    if code in ("ExpiredToken", "InvalidToken", "TokenRefreshRequired"):
        return " (the token has expired)"
    if status in (401, 403):
        return " (these credentials may not do that; see docs/object-stores.md for the rights that are needed)"
    return ""
