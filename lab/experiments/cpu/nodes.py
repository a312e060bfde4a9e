# SPDX-License-Identifier: Apache-2.0
"""Runs a command on a Ray cluster of several nodes, all on this machine, each with a working folder of its own.

    python -m lab.experiments.cpu.nodes 2 python -m verl.trainer.main_ppo ...

The nodes' folders are `node-0`, `node-1`, ... in GRADLOC_RUN_DIR; the command itself keeps the current one. Ray's own
files go to a folder of their own, so that no other Ray of this machine takes these nodes for its cluster.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CPUS_PER_NODE = 8
"""Logical: a worker asks for three, verl's TaskRunner for one."""


def main(argv=None) -> int:
    """Starts the nodes, runs the command, ends the nodes; returns the command's exit code."""
    number, *command = sys.argv[1:] if argv is None else argv
    here, run_dir = Path.cwd(), Path(os.environ["GRADLOC_RUN_DIR"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the nodes are ended, too
    with tempfile.TemporaryDirectory(prefix="gradloc-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        from ray.cluster_utils import Cluster  # reads the variable

        cluster = Cluster()
        try:
            for index in range(int(number)):
                home = run_dir / f"node-{index}"
                home.mkdir()
                os.chdir(home)  # what is started from here has it as its own
                cluster.add_node(num_cpus=CPUS_PER_NODE, num_gpus=1, include_dashboard=False)
            os.chdir(here)
            return subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}, check=False).returncode
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
