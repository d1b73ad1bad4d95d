"""The planner: what every worker does in one step, for any set of lost workers.

Pure: no torch, socket or thread. Time, where a budget needs it, comes in as a `Clock`.
The ideas are ReCycle's (arXiv 2405.14009); decoupled backward is from zero-bubble pipelines
(arXiv 2401.10241).
"""
