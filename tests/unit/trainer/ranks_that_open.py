"""One rank of a trainer that opens a run, as a process: `python ranks_that_open.py FOLDER`. A launcher sets RANK and WORLD_SIZE.

HURT="<rank> fails" or "<rank> dies": what this rank does instead of reading the base. A rank prints how `open` ended for it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Never

from synthetic import run_config

from services.trainer import ranks
from services.trainer.ranks import Options, Rank, Ranks, follow
from shared import objects as stores

RANK = int(os.environ["RANK"])


def hurt(*_: Any) -> Never:
    if os.environ["HURT"].endswith("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("the store is away")


def main() -> None:
    folder = Path(sys.argv[1])
    objects = stores.connect((folder / "objects").as_uri())
    if int(os.environ["HURT"].split()[0]) == RANK:
        ranks.download_directory = hurt
    own = Rank(objects, folder / f"cache-{RANK}")
    try:
        if RANK:
            follow(own)
        else:
            config = run_config(objects, folder / "base")
            leader = Ranks(own)
            try:
                leader.call("open", config, None, Options())
            finally:
                leader.end()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
