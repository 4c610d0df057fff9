"""Probes: sentences and pairs whose words were moved in a known way, as datasets."""

from pelocality.probes.info import ProbeInfo, probe_info
from pelocality.probes.minimal import minimal_pairs
from pelocality.probes.roles import semantic_role_swap
from pelocality.probes.shuffling import constituency_shuffling, random_shuffling, window_shuffling

__all__ = [
    "ProbeInfo",
    "constituency_shuffling",
    "minimal_pairs",
    "probe_info",
    "random_shuffling",
    "semantic_role_swap",
    "window_shuffling",
]
