"""One torch thread a process (tests run in parallel, tiny matrices gain nothing from more) and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import settings

settings.register_profile("shared", deadline=None)  # a busy machine is no failure; what is timed has a benchmark
settings.load_profile("shared")
