"""Semantic role swaps, and the grammar behind them; docs/probes.md explains the files in order."""
