"""One thread a process: the models are tiny, and tests that start processes share the cores."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--draws", type=int, default=300, help="random batches of tests/test_fuzz.py (with -m slow)")
