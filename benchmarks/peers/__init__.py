"""Other tools beside normscope, on the same weights and inputs: agreement, processor time and memory.

Each peer is installed in an environment of its own and runs as a process of its own, with a small adapter of ours that
reads a job and writes a result as JSON. A peer that cannot be installed or that fails is reported with its message.
"""
