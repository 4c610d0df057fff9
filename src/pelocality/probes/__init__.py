"""Probes: sentences and pairs whose words were moved in a known way, and needles in a haystack, as datasets."""

from pelocality.probes.info import ProbeInfo as ProbeInfo, probe_info as probe_info
from pelocality.probes.minimal import minimal_pairs as minimal_pairs
from pelocality.probes.needles import needle_items as needle_items
from pelocality.probes.role_swap.build import semantic_role_swap as semantic_role_swap
from pelocality.probes.shuffling import (
    constituency_shuffling as constituency_shuffling,
    random_shuffling as random_shuffling,
    window_shuffling as window_shuffling,
)
