"""Measuring the attention of a model: on repeated words, on text, and of reversed text."""
