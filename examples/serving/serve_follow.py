"""Keep a live torch module up to date with a run, with ckptstore's `Follower`. All or nothing.

The follower reads only what lies between two checkpoints, and changes the module's tensors when everything new is in
memory and verified. Where ckptstore is not installed, use `ckpt publish` and serve_published.py.

    python serve_follow.py s3://bucket/runs/gpt --layers 2
"""

from __future__ import annotations

import argparse

import torch

import ckptstore


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("store")
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--every", type=float, default=1.0)
    arguments.add_argument("--timeout", type=float)
    asked = arguments.parse_args()
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(asked.layers)))
    follower = ckptstore.open(asked.store, create=False).follow(
        into={"model": module.state_dict()}, select="model.*", poll=asked.every, timeout=asked.timeout
    )
    with follower:
        while True:
            try:
                found = next(follower, None)
            except (ckptstore.StorageError, ckptstore.CorruptionError) as error:
                print("still serving the previous weights because", error, flush=True)
                continue
            if found is None:
                return
            print("serving", found.info.ref, flush=True)


if __name__ == "__main__":
    main()
