"""Semantic role swaps: who did what to whom, the other way round. English grammar stands behind it."""
