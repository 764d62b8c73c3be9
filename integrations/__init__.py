"""Trainers that run their log-prob passes through longstraw-dist: one folder each."""
