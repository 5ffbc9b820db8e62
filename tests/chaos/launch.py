"""`gspo_megatron.launch` with a proxy before each server: `python -m tests.chaos.launch FAULTS LOG [ARGUMENTS]`.

FAULTS is a JSON file with a list of proxy.Fault's fields, LOG the file that says what happened.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gspo_megatron import launch, supervisor
from gspo_megatron.fleet import Server, announce
from tests.chaos.proxy import Chaos, Fault


def main() -> int:
    """Run; returns the exit status."""
    faults_path, log_path, *arguments = sys.argv[1:]
    faults = [Fault(**fields) for fields in json.loads(Path(faults_path).read_text())]
    chaos = Chaos(faults, Path(log_path))

    def announce_proxy(folder: Path, server: Server) -> None:
        announce(folder, chaos.put_before(server))

    supervisor.announce = announce_proxy
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
