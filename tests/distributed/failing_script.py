"""A training script, as a user has one, in which rank 1 fails: for test_launchers.py.

torchrun --nproc_per_node 2 tests/distributed/failing_script.py ENGINE WHERE KIND FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from tests.distributed.test_one_rank_fails import train
from tests.distributed.wrappings import import_deepspeed


def main() -> None:
    engine, where, kind, folder = sys.argv[1:]
    torch.set_num_threads(1)
    if engine == "zero3":
        import_deepspeed().init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    train(dist.get_rank(), engine, where, kind, Path(folder))


if __name__ == "__main__":
    main()
