"""Looks at runs: evaluation, prediction, reports, charts, exports."""
