"""Judges kernels: right, fast, and honest? The page docs/judge.md explains verdicts."""

from torchkiln.judge.judging import judge, judge_folder
from torchkiln.judge.verdict import Finding, Verdict, fast_p

__all__ = ["Finding", "Verdict", "fast_p", "judge", "judge_folder"]
