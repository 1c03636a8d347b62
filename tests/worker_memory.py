"""Does a worker grow with the tasks that it learns? `python tests/worker_memory.py 300`, about ten minutes.

All jobs of a daemon in one process, without Ray: tasks are checked, learned and built into versions, the oldest are
forgotten so that five are known. Prints the memory after every tenth task, after every fiftieth what of it is in use:
what is left when the allocator was asked to give back what is free.
"""

import argparse
import ctypes
import gc
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from daemon_parts import daemon, small_config
from soak import cost, drop_some

from mqmk.daemon.config import Gate, Pools
from mqmk.daemon.records import Records
from mqmk.learner import sketches

KNOWN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mqmk-memory-") as folder:
        config = small_config(Path(folder), gate=Gate(accuracy_floor=0.0), pools=Pools(keep=3))
        config = replace(config, bucket=replace(config.bucket, after_learning="delete"))
        parts = daemon(config)
        parts.orchestrator.records = Records(config, parts.ledger, parts.files, None)
        known: list[str] = []
        themes = [*sketches.TASKS]
        for number in range(given.tasks):
            theme = themes[number % len(themes)]
            known.append(f"{theme}-{number}")
            drop_some(Path(folder) / "bucket", theme, known[-1], seed=number)
            parts.run()
            assert parts.states[known[-1]] == "PUBLISHED", parts.states
            if len(known) > KNOWN:
                parts.ledger.ask("forget", known.pop(0))
                parts.run()
            if number % 10 == 9:
                told = f"{number + 1} tasks: {cost(os.getpid())['MiB']:.0f} MiB"
                if number % 50 == 49:
                    gc.collect()
                    ctypes.CDLL("libc.so.6").malloc_trim(0)
                    told += f", in use {cost(os.getpid())['MiB']:.0f}"
                print(told, flush=True)
        parts.close()


if __name__ == "__main__":
    main()
