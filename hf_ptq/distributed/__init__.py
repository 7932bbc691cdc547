"""The ranks of a run: process group, agreements, and the plan of what lies where."""
