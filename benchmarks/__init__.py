"""What was measured, how, and on what. Run a script from the root of the repository: `python -m benchmarks.NAME`."""
