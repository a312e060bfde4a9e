# SPDX-License-Identifier: Apache-2.0
"""Run a command on a Ray cluster of several nodes on this machine, each with a separate working folder.

    python -m lab.experiments.cpu.nodes 2 python -m verl.trainer.main_ppo ...

The nodes' folders are `node-0`, `node-1`, ... in GRADLOC_RUN_DIR; the command keeps the current one. Ray's files
go to a separate folder, so that no other Ray on this machine joins this cluster.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

CPUS_PER_NODE = 8
"""Logical CPUs: a worker requests three, verl's TaskRunner one."""


def main(argv=None) -> int:
    """Start the nodes, run the command, stop the nodes; return the command's exit code."""
    number, *command = sys.argv[1:] if argv is None else argv
    here, run_dir = Path.cwd(), Path(os.environ["GRADLOC_RUN_DIR"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the nodes are stopped as well
    with tempfile.TemporaryDirectory(prefix="gradloc-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        from ray.cluster_utils import Cluster  # reads the variable

        cluster = Cluster()
        try:
            for index in range(int(number)):
                home = run_dir / f"node-{index}"
                home.mkdir()
                os.chdir(home)  # child processes inherit the working folder
                cluster.add_node(num_cpus=CPUS_PER_NODE, num_gpus=1, include_dashboard=False)
            os.chdir(here)
            return subprocess.run(command, env={**os.environ, "RAY_ADDRESS": cluster.address}, check=False).returncode
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
