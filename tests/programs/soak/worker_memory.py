"""Measure a worker's memory over many tasks: `python -m programs.soak.worker_memory 300`, about ten minutes.

Runs all jobs of a daemon in one process, without Ray: tasks are validated, learned and built into versions; the oldest
are forgotten so that five remain. Prints the memory after every tenth task and, after every fiftieth, what remains
after malloc_trim.
"""

import argparse
import ctypes
import gc
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from programs.soak.run import drop_task, process_usage
from support.daemons.daemon import daemon, small_config

from mqmk.daemon.app import outbound_for
from mqmk.daemon.config.sections import Gate, Pools
from mqmk.learner.data import sketches

KNOWN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mqmk-memory-") as folder:
        config = small_config(Path(folder), gate=Gate(accuracy_floor=0.0), pools=Pools(keep=3))
        config = replace(config, bucket=replace(config.bucket, after_learning="delete"))
        parts = daemon(config)
        parts.outbound = outbound_for(config, parts.ledger, parts.files, None)
        known: list[str] = []
        themes = [*sketches.TASKS]
        for number in range(options.tasks):
            theme = themes[number % len(themes)]
            known.append(f"{theme}-{number}")
            drop_task(Path(folder) / "bucket", theme, known[-1], seed=number)
            parts.run()
            assert parts.states[known[-1]] == "PUBLISHED", parts.states
            if len(known) > KNOWN:
                parts.ledger.enqueue_command("forget", known.pop(0))
                parts.run()
            if number % 10 == 9:
                line = f"{number + 1} tasks: {process_usage(os.getpid())['MiB']:.0f} MiB"
                if number % 50 == 49:
                    gc.collect()
                    ctypes.CDLL("libc.so.6").malloc_trim(0)
                    line += f", in use {process_usage(os.getpid())['MiB']:.0f}"
                print(line, flush=True)
        parts.close()


if __name__ == "__main__":
    main()
