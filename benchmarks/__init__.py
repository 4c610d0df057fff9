"""Speed and memory against peers and physical limits, as ratios within one run."""
