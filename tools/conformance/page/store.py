"""A whole store: every promised checkpoint, restored by the page alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tools.conformance.page import codecs, log, ranks, segments, steps
from tools.conformance.page.codecs import RefusedError

CHUNK = 1 << 24
WITH_BASE = ("xor", "sub", "step")


class LostError(Exception):
    """A checkpoint cannot be restored."""


class State:
    """The state at the end of one way. Tensors are decoded on demand: damage that no tensor needs does not matter."""

    def __init__(self, trees: list[Any], tensors: dict[str, dict[str, Any]], files: dict[str, bytes], below: Any):
        self.trees, self.tensors, self.files, self.below = trees, tensors, files, below
        self.images: dict[str, bytes] = {}
        self.tree: Any = None
        self.parts: dict[str, list[str]] = {}

    def image(self, key: str) -> bytes:
        if key not in self.images:
            self.decode(key)
        return self.images[key]

    def payloads(self, key: str) -> list[bytes]:
        return [payload(self.files[key], chunk) for chunk in self.tensors[key]["chunks"]]

    def of_base(self, key: str) -> bytes:
        """5.4: the base tensor has the same name, dtype and shape."""
        below = {} if self.below is None else self.below.tensors
        if key not in below or any(below[key][name] != self.tensors[key][name] for name in ("dtype", "shape")):
            raise LostError("not in the base")
        return self.below.image(key)

    def decode(self, key: str) -> None:
        tensor = self.tensors[key]
        params = {name: value for name, value in tensor["params"].items() if name != "of"}
        if tensor["codec"] == "step":
            self.images |= taken(self, params.get("leader", key))
            return
        base, wide = b"", 1
        if "of" in tensor["params"]:
            of = self.tensors.get(tensor["params"]["of"])
            if not derivable(of, tensor):
                raise LostError("nothing to derive from")
            base, wide = self.image(tensor["params"]["of"]), 2
        elif tensor["codec"] in WITH_BASE:
            base = self.of_base(key)
        self.images[key] = b"".join(
            codecs.decode(tensor["codec"], params, data, chunk["logical"], base[wide * k * CHUNK :][: wide * CHUNK])
            for k, (data, chunk) in enumerate(zip(self.payloads(key), tensor["chunks"], strict=True))
        )

    def prove(self, state: str) -> None:
        """5.1, 5.4, 4: the checks of the restored checkpoint; its bases are not checked."""
        if len(self.trees) != 1:
            raise LostError("not one tree")
        self.tree = self.trees[0]
        self.parts = {name: parts_of(name, self.tensors) for name in names_of(self.tree)}
        for key in [key for keys in self.parts.values() for key in keys]:
            for k, chunk in enumerate(self.tensors[key]["chunks"]):
                found = xxhash.xxh3_64_hexdigest(self.image(key)[k * CHUNK : (k + 1) * CHUNK])
                if chunk["decoded_hash"] != found:
                    raise LostError("decoded bytes, or no hash of them")
        if state_hash(self) != state:
            raise LostError("another state")


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalog = log.read(folder)
        self.ways_of: dict[log.Node, list[State]] = {}

    def answer(self) -> dict[str, Any]:
        latest: Any
        try:
            node = self.catalog.latest()
            latest = f"{node[1]}@{node[0]}" if node else None
        except log.DamagedError:
            latest = {"error": "the log is damaged"}
        found = {}
        for term, step in self.catalog.promised():
            try:
                found[f"{step}@{term}"] = self.describe((term, step))
            except (LostError, RefusedError) as error:
                found[f"{step}@{term}"] = {"error": f"{error!r}"}
        tags = {name: self.tagged(name) for name in self.catalog.tags}
        return {"latest": latest, "checkpoints": found} | ({"tags": tags} if tags else {})

    def tagged(self, name: str) -> Any:
        try:
            node = self.catalog.tagged(name)
        except log.DamagedError:
            return {"error": "the log is damaged"}
        return f"{node[1]}@{node[0]}" if node else None

    def describe(self, node: log.Node) -> dict[str, Any]:
        state = self.restore(node)
        tensors = {}
        for name, keys in state.parts.items():
            one = state.tensors[keys[0]]
            image, shape = state.image(name) if keys == [name] else put_together(state, keys), one["global_shape"]
            tensors[name] = {
                "dtype": one["dtype"],
                "shape": shape or one["shape"],
                "hash": xxhash.xxh3_128_hexdigest(image),
            }
        every = self.catalog.encodings[node]
        there = [edge for edge in every if edge["base"] is None or tuple(edge["base"][:2]) in self.catalog.checkpoints]
        lossy = all(edge["lossy"] for edge in there or every)
        said = self.catalog.checkpoints[node].get("metadata")
        return {
            "state": self.catalog.checkpoints[node]["state"],
            "lossy": lossy,
            **({"metadata": said} if said else {}),
            "tree": state.tree,
            "tensors": tensors,
            **({} if (whole := ranks.unranked(state.tree)) == state.tree else {"unranked": canonical(whole)}),
        }

    def restore(self, node: log.Node) -> State:
        """Restore by the first way that gives the state. 7.4: if one fails for any reason, the others are tried."""
        reason: Exception = LostError("no path")
        for way in self.ways(node):
            try:
                way.prove(self.catalog.checkpoints[node]["state"])
            except (LostError, RefusedError) as error:
                reason = error
                continue
            return way
        raise reason

    def ways(self, node: log.Node) -> list[State]:
        """Every way to a checkpoint whose segments agree with the log."""
        if node not in self.ways_of:
            self.ways_of[node] = []  # a ring of encodings leads nowhere
            edges = [edge for edge in self.catalog.encodings.get(node, []) if self.leads(edge, {node})]
            self.ways_of[node] = [way for edge in edges for way in self.of_edge(node, edge)]
        return self.ways_of[node]

    def leads(self, edge: dict[str, Any], seen: set[log.Node]) -> bool:
        """7.4: whether an encoding leads from nothing to its checkpoint, according to the catalog."""
        if any(segment not in self.catalog.segments for segment in edge["segments"]):
            return False
        if len(set(edge["segments"])) < len(edge["segments"]):
            return False
        if edge["base"] is None:
            return True
        base = (edge["base"][0], edge["base"][1])
        if self.catalog.checkpoints.get(base, {}).get("state") != edge["base"][2] or base in seen:
            return False
        return any(self.leads(below, seen | {base}) for below in self.catalog.encodings.get(base, []))

    def of_edge(self, node: log.Node, edge: dict[str, Any]) -> list[State]:
        """5.4: the encodings may differ in tensors that the base's tree does not name, so each is tried."""
        try:
            trees, tensors, files = self.opened(node, edge)
        except (LostError, RefusedError):
            return []
        bases: list[State | None] = [None]
        if any(tensor["codec"] in WITH_BASE for tensor in tensors.values()):
            bases = [] if edge["base"] is None else [*self.ways((edge["base"][0], edge["base"][1]))]
        return [State(trees, tensors, files, below) for below in bases]

    def opened(
        self, node: log.Node, edge: dict[str, Any]
    ) -> tuple[list[Any], dict[str, dict[str, Any]], dict[str, bytes]]:
        tensors: dict[str, dict[str, Any]] = {}
        files: dict[str, bytes] = {}
        step, trees = str(node[1]), []
        for segment in edge["segments"]:
            data, doc = self.segment(segment)
            told = doc["encodings"].get(step)
            if told is None or told["term"] != node[0] or told["base"] != edge["base"]:
                raise LostError("the segment says otherwise")
            trees += [doc["trees"][step]] if step in doc["trees"] else []
            own = doc["tensors"][step]
            steps.check_groups(own)
            for tensor in own.values():
                key = key_of(tensor, tensor["name"])
                if key in tensors:
                    raise LostError("in two segments")
                tensors[key] = tensor | {"params": keyed(tensor, own)}
                files[key] = data
        return trees, tensors, files

    def segment(self, identity: str) -> tuple[bytes, dict[str, Any]]:
        entry = self.catalog.segments.get(identity)
        if entry is None:
            raise LostError("no record adds the segment")
        data = log.text_of(self.folder / "seg" / f"{entry['term']:010d}" / f"{identity}.safetensors")
        header = data[: entry["header"]]
        if len(data) != entry["size"] or xxhash.xxh3_128_hexdigest(header) != entry["hash"]:
            raise LostError("header")
        doc = segments.read(data)
        if (doc["run"], doc["term"], doc["segment"]) != (self.catalog.run, entry["term"], identity):
            raise LostError("another segment")
        return data, doc


def names_of(tree: Any) -> Iterator[str]:
    """The tensors of a tree, each once: 3.1, a reader that passes the tree on."""
    found: dict[str, None] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and len(node) == 1 and next(iter(node)) in ("$t", "$a"):
            (name,) = node.values()
            if not isinstance(name, str) or name == "__metadata__" or name.startswith("ckptstore/"):
                raise LostError("the name of a tensor")
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise LostError("the name of a tensor")
            found[name] = None
        elif isinstance(node, dict | list):
            waiting += node.values() if isinstance(node, dict) else node
    return iter(found)


def key_of(tensor: dict[str, Any], name: str) -> str:
    """5.1, shards: the key of an entry, or the tensor `name` that is cut like it. No name has a surrogate."""
    if tensor["offset"] is None:
        return name
    return f"{name}\ud800{json.dumps([tensor['offset'], tensor['shape'], tensor['global_shape']])}"


def keyed(tensor: dict[str, Any], own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Parameters that name tensors, by the tensors' keys; `own`: the entries of the same segment."""
    params = dict(tensor["params"])
    if tensor["codec"] == "derive":
        params["of"] = key_of(tensor, params["of"])
    if tensor["codec"] == "step" and "members" in params:
        params["members"] = [[key_of(own[name], name) for name in member] for member in params["members"]]
    return params


def parts_of(name: str, tensors: dict[str, dict[str, Any]]) -> list[str]:
    """The stored parts of a tensor, by offset."""
    found = sorted(
        (key for key, tensor in tensors.items() if tensor["name"] == name), key=lambda key: tensors[key]["offset"] or []
    )
    if found == [name]:
        return found
    if not found:
        raise LostError("a tensor is missing")
    shards = [tensors[key] for key in found]
    kinds = {(shard["dtype"], tuple(shard["global_shape"] or [])) for shard in shards}
    if name in found or len(kinds) != 1:
        raise LostError("no shards of one tensor")
    counts = np.zeros(shards[0]["global_shape"], np.uint8)
    for shard in shards:
        if not math.prod(shard["shape"]):
            raise LostError("a shard without elements")
        counts[box_of(shard)] += 1
    if (counts != 1).any():
        raise LostError("elements in no shard, or in two")
    return found


def box_of(shard: dict[str, Any]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(shard["offset"], shard["shape"], strict=True))


def put_together(state: State, keys: list[str]) -> bytes:
    first = state.tensors[keys[0]]
    size = segments.ITEM[first["dtype"]]
    whole = np.zeros([*first["global_shape"], size], np.uint8)
    for key in keys:
        shard = state.tensors[key]
        whole[box_of(shard)] = np.frombuffer(state.image(key), np.uint8).reshape([*shard["shape"], size])
    return whole.tobytes()


def tensor_hash(image: bytes) -> bytes:
    chunks = [image[at : at + CHUNK] for at in range(0, len(image), CHUNK)]
    hashes = b"".join(xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little") for chunk in chunks)
    return bytes.fromhex(xxhash.xxh3_128_hexdigest(hashes))


def payload(data: bytes, chunk: dict[str, Any]) -> bytes:
    found = data[chunk["offset"] : chunk["offset"] + chunk["length"]]
    if xxhash.xxh3_64_hexdigest(found) != chunk["stored_hash"]:
        raise LostError("stored bytes")
    return found


def derivable(of: dict[str, Any] | None, tensor: dict[str, Any]) -> bool:
    return of is not None and (of["dtype"], of["shape"]) == ("F32", tensor["shape"]) and of["codec"] != "derive"


def taken(state: State, leader: str) -> dict[str, bytes]:
    """The images of a group's tensors."""
    tensors, params = state.tensors, state.tensors[leader]["params"]
    members = params["members"]
    old = [
        np.frombuffer(b"".join(state.of_base(member[slot]) for member in members), "<u4")
        for slot in range(len(members[0]))
    ]
    parts = [
        steps.decode(params["encoding"], params["rule"], data, [one[k << 22 : (k + 1) << 22] for one in old])
        for k, data in enumerate(state.payloads(leader))
    ]
    images: dict[str, bytes] = {}
    for slot in range(len(old)):
        image, at = b"".join(part[slot].tobytes() for part in parts), 0
        for member in members:
            length = sum(chunk["logical"] for chunk in tensors[member[slot]]["chunks"])
            images[member[slot]] = image[at : at + length]
            at += length
    return images


def canonical(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


def numbers(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def state_hash(state: State) -> str:
    """Section 4."""
    hasher = xxhash.xxh3_128()

    def part(data: bytes) -> None:
        hasher.update(len(data).to_bytes(8, "little") + data)

    part(canonical(state.tree).encode())
    for name, keys in sorted(state.parts.items()):
        tensor = state.tensors[keys[0]]
        part(name.encode())
        part(tensor["dtype"].encode())
        part(numbers(tensor["global_shape"] or tensor["shape"]))
        places = [
            b"" if key == name else numbers(state.tensors[key]["offset"] + state.tensors[key]["shape"]) for key in keys
        ]
        part(b"".join(place + tensor_hash(state.image(key)) for place, key in zip(places, keys, strict=True)))
    return str(hasher.hexdigest())
