"""First on PYTHONPATH: workers that are pinned to simulated GPUs (`--gpus sim:3`) run on the first real one.

So graphs of several workers can be tried where there is one card. Each engine needs its own part of the memory.
"""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-sim"):
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
