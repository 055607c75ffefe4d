"""The estimator against everything measured that is shipped; `python -m benchmarks.estimator` writes docs/guides/estimator.md's tables."""
