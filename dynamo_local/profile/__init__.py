"""How long a pass of an engine takes: measured surfaces and their interpolation.

    model = ProfileModel.load(DEFAULT_PROFILE)
    model.ttft_s(3000)          # seconds until the first token of a prompt of 3000 tokens, alone
    model.itl_s(200_000, 1500)  # seconds per token with 200,000 tokens of KV in use, 1500 per sequence

    prefill, decode = interpolators(DEFAULT_PROFILE)      # what a planner asks: see `capacity`
    decode.find_best_throughput_per_gpu(10, 3150).value   # tokens/s/GPU with an ITL of at most 10 ms

Nothing here knows an engine. The simulated engine, the simulator and the planners ask the same model.
"""

from dynamo_local.profile.interpolation import (
    Best,
    DecodeInterpolator,
    Estimate,
    FixedModel,
    PerfModel,
    PrefillInterpolator,
    ProfileModel,
    interpolators,
)
from dynamo_local.profile.reading import (
    DEFAULT_PROFILE,
    Profile,
    nearest_shipped,
    profile_folder,
    read_profile,
    shipped_profiles,
)

__all__ = [
    "DEFAULT_PROFILE",
    "Best",
    "DecodeInterpolator",
    "Estimate",
    "FixedModel",
    "PerfModel",
    "PrefillInterpolator",
    "Profile",
    "ProfileModel",
    "interpolators",
    "nearest_shipped",
    "profile_folder",
    "read_profile",
    "shipped_profiles",
]
