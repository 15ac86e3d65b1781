"""Programs for TPUs on a machine without one: compiled ahead of time, and what they will cost."""
